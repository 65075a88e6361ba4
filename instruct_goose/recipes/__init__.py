"Complete jobs, from the data to the report."

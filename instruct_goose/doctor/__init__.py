"What the files of a run say about it: rules, a diagnosis, a report."

"A page has no command line: only what classes of settings name stands here."

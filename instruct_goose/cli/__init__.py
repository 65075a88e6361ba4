"The command line."

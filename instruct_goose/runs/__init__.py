"A run's directory: checkpoints, resuming, the log, trackers."

"Experience, update and the trainer: PPO and its family."

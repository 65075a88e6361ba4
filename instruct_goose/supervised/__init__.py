"Training on given texts: SFT, reward models, DPO and KTO."

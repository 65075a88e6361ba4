"The mathematics: masks, KL, advantages, the losses of the policy, of values and of preferences."

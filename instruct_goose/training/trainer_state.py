def trainer_state(trainer): raise NotImplementedError
def load_trainer_state(trainer, tensors, record): raise NotImplementedError

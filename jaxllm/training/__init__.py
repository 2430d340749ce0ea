"""Training: objectives, optimizers, sharding, one jitted step, checkpoints, evaluation and the
loop.
"""

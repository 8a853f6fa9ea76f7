"""A module cut over the ranks of a topology: what the strategies of the Trainer and of Fabric have in common.

sizes             of the run, and what follows for samplers and workers
model             ParallelModel: everything below, done to one module
placement         where each parameter lives, and what follows for gradients, norms and checkpoints
tensor_parallel   dense layers cut by a plan
sharding          replicas in parts over data-parallel ranks
gradients         averages in buckets, norms, clipping, scaling
automatic, trial  schedules chosen by prediction, and the two best timed
randomness        equal where activations are replicated, different where they are cut
workers           the same, in the workers of a data loader
companions        averaged copies of a model, and metrics
state             of modules and optimizers, with names for positions
"""

"""Building blocks of models: weights bound to kernels. Owns nothing else."""

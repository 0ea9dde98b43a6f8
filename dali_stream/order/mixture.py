import numpy as np


class MixtureOrder:
    def __init__(self, lengths, shares, shuffle=True, seed=0, epoch=0, consumers=32, episode_pool_size=8, ranges=None):
        flat = np.concatenate([np.asarray(x) for x in lengths])
        e = np.repeat(np.arange(len(flat)), flat)
        f = np.concatenate([np.arange(n) for n in flat])
        p = np.random.default_rng([seed, epoch]).permutation(len(e))
        self.e, self.f = e[p], f[p]

    def read(self, start, count, rank=0, world_size=1):
        first = start + (rank - start) % world_size
        s = slice(first, first + count * world_size, world_size)
        return self.e[s], self.f[s]

"""Text to token shards to batches.

    tokenizer   text <-> token ids
    dataset     the on-disk token dataset: writing is `prepare`'s, reading is `TokenDataset`'s
    prepare     documents -> token shards, in several processes, resumable
    mixture     several datasets in given proportions
    loader      token shards -> training and evaluation batches

Nothing here imports jax; `loader` imports Grain, which does.
"""

"""Text to token shards to batches.

Reading, in the order of the data:

    shards        files of tokens, read by position
    dataset       what is on disk: shards and metadata -> tokens
    mixture       several datasets in given proportions
    loader        tokens -> training and evaluation batches
    documents     tokens -> batches that read each document from its start

Preparing, in the order of the data:

    readers       settings; raw documents of each kind of input -> their texts
    sources       settings -> files and hub datasets -> raw documents
    tokenization  texts -> tokens, in worker processes
    tokenizer     text <-> token ids
    writer        tokens -> shards, their metadata, and the progress file
    preparation   all of it

Nothing here imports jax, except `loader` through Grain.
"""

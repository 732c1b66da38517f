"""Text to token shards to batches.

Reading, in the order of the data:

    format      what is on disk: names and records
    dataset     token shards -> tokens
    mixture     several datasets in given proportions
    loader      tokens -> training and evaluation batches
    documents   tokens -> batches that read each document from its start

Preparing, in the order of the data:

    settings    what to prepare
    inputs      sources -> files and hub datasets, and their documents in order
    readers     one file or hub dataset -> raw documents; one reader per kind
    raw         a raw document -> its text
    tokenize    texts -> tokens, in worker processes
    tokenizer   text <-> token ids
    shards      tokens -> shards, their metadata, and the progress file
    join        the parts of several machines -> one dataset
    report      progress on stderr
    prepare     all of it

Nothing here imports jax, except `loader` through Grain.
"""

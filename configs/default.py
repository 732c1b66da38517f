"""Every field of a run with its default: the paper's 125M model and recipe. Other configs change what they name.

Override any field from the command line: --config.optimizer.learning_rate=1e-3.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            total_tokens=300_000_000_000,  # predicted tokens over the whole run; the last step may overshoot
            sequence_length=1024,  # tokens predicted per sequence
            batch_size=480,  # sequences per optimizer step, over all devices and accumulation steps
            accumulation_steps=1,  # forward-backward passes per optimizer step
            data=dict(
                path="data/pile",  # folder of token datasets, one a split (scripts/prepare_data.py)
                tokenizer="gpt2",
                train_split="train",
                validation_split="validation",
            ),
            model=dict(
                vocab_size=50257,
                padded_vocab_size=50304,
                n_layers=24,
                d_model=768,
                n_heads=24,
                d_key=32,
                d_value=32,
                dtype="float32",  # of matmul inputs: bfloat16 on accelerators
                remat=False,  # recompute each layer in the backward pass: less memory, more time
                implementation=placeholder(str),  # of log_attention: chunked, scan, reference; None for the best
                document_token=placeholder(int),  # forget all before this id (gpt2: 50256, bytes: 256); None: never
            ),
            optimizer=dict(
                learning_rate=6e-4,  # after warm-up
                final_learning_rate=6e-5,  # at the end of the cosine
                warmup_steps=2000,
                b1=0.9,
                b2=0.95,
                eps=1e-8,
                weight_decay=0.1,  # on matrices and embedding only
                clip_norm=1.0,  # global norm of the gradient
            ),
            log_every=10,  # steps
            validate_every=1000,  # steps, and at the end
            validation_tokens=1_000_000,  # from the start of the split, at most
            checkpoint_every=1000,  # steps, and at the end
            keep_checkpoints=3,  # the newest ones
            peak_flops=placeholder(float),  # per device and second, for the utilisation; None: known or measured
        )
    )

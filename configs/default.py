"""Every field of a run with its default: the paper's 125M model and recipe. Other configs change what they name.

Override any field from the command line: --config.optimizer.learning_rate=1e-3.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            init_from=placeholder(str),  # start from the weights of another run or of scripts/export.py; None: random
            total_tokens=300_000_000_000,  # predicted tokens over the whole run; the last step may overshoot
            sequence_length=1024,  # tokens predicted per sequence
            batch_size=480,  # sequences per optimizer step, over all devices and accumulation steps
            accumulation_steps=1,  # forward-backward passes per optimizer step
            mesh=dict(  # devices along each axis (heinsen/parallel.py); -1 for one: all that the others leave
                data=-1,  # split the batch, repeat the parameters
                fsdp=1,  # split the batch, and the parameters and optimizer state too
                tensor=1,  # split the heads
                sequence=1,  # split the tokens of every sequence
            ),
            data=dict(
                path="data/pile",  # token datasets (scripts/prepare_data.py): a folder, or A:0.7,B:0.3 for a mixture
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
                attention="heinsen",  # or softmax, sigmoid, linear; or a pattern that repeats: heinsen*3,softmax
                sigmoid_alpha=1.0,  # sigmoid: the sum over n visible keys is divided by n^alpha
                sigmoid_bias="0.0",  # sigmoid: added to its logits; a number, or -log_n
                value_domain="log",  # heinsen: W1 gives logarithms of values, W2 takes that of y; or real values and y
                qk_norm=False,  # normalise queries and keys of each head by their root mean square, with learned scales
                block="heinsen",  # the paper's; or gpt2: attention with a projection, then an MLP D -> 4D -> D
                position="recurrent",  # the paper's; learned, rotary (softmax and sigmoid layers), none
                n_positions=placeholder(int),  # learned: how many there are, at least sequence_length
                objective="next_token",  # or masked: a bidirectional model that fills in masked tokens
                dtype="float32",  # of matmul inputs: bfloat16 on accelerators
                remat="none",  # or to compute again in the backward pass: full (layers), dots (all but products)
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
            log_activations=False,  # with validations, each layer's root mean squares: of its attention, and after it
            checkpoint_every=1000,  # steps, and at the end
            keep_checkpoints=3,  # the newest ones
            keep_every=placeholder(int),  # besides them keep those of every so many steps for ever; None: none
            stop_after_skipped=10,  # steps in a row whose loss or gradient is not finite; each is skipped
            spike_sigmas=placeholder(float),  # tell of losses so many standard deviations above the last; None: never
            trace_steps=placeholder(str),  # FIRST:LAST, traced by jax.profiler into WORKDIR/trace; None: none
            wandb_project=placeholder(str),  # log to Weights & Biases too (pip install wandb); None: no
            peak_flops=placeholder(float),  # per device and second, for the utilisation; None: known or measured
        )
    )

"""Defaults of every field of a run: the paper's 125M model and recipe. Other configs change what they name.

Override any field from the command line: --config.optimizer.learning_rate=1e-3.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,  # from 0 to 2^63 - 1; initial weights depend on its lower 32 bits
            init_from=placeholder(str),  # run or export whose weights to start from; None: random weights
            total_tokens=300_000_000_000,  # tokens to predict in the whole run; the last step may exceed it
            sequence_length=1024,  # tokens predicted per sequence
            batch_size=480,  # sequences per optimizer step, over all devices and accumulation steps
            accumulation_steps=1,  # microbatches per optimizer step, one at a time, to save memory
            mesh=dict(  # devices along each axis (heinsen/parallel.py); one may be -1: all remaining devices
                data=-1,  # splits the batch, replicates the parameters
                fsdp=1,  # splits the batch, the parameters and the optimizer state
                tensor=1,  # splits the heads
                sequence=1,  # splits the tokens of every sequence
            ),
            data=dict(
                path="data/pile",  # folder of train/ and others (scripts/prepare_data.py), or A:0.7,B:0.3 for a mixture
                validation_split="validation",
            ),
            model=dict(
                vocab_size=placeholder(int),  # None: the data's; a run's config.json has the number
                padded_vocab_size=placeholder(int),  # rows of the embedding; None: the next multiple of 128 (small: 8)
                n_layers=24,
                d_model=768,
                n_heads=24,
                d_key=32,
                d_value=32,
                attention="heinsen",  # or softmax, sigmoid, linear, delta; or a pattern: heinsen*3,softmax
                sigmoid_alpha=1.0,  # sigmoid: the sum over n visible keys is divided by n^alpha
                sigmoid_bias="0.0",  # sigmoid: added to the logits; a number, or -log_n
                value_domain="log",  # heinsen: W1 outputs log values and W2 reads log y; real: values and y themselves
                convolution=0,  # taps of a short causal convolution of queries, keys and values, such as 4; 0: none
                feature_map="none",  # heinsen: learned maps of queries and keys: exponential, elu, relu, softmax
                d_features=placeholder(int),  # of a head, even; None: 2 d_key
                forget_gate="none",  # all but sigmoid: head: a forget gate, one number per head and token
                forget_gate_shortest=2.0,  # its heads' time constants at the start, in tokens, spread from this ...
                forget_gate_longest=4096.0,  # ... to this
                output_gate=False,  # whether the attention's output is multiplied by 2 sigmoid(Wg x)
                block="heinsen",  # the paper's; or gpt2: attention with a projection, then an MLP D -> 4D -> D
                position="recurrent",  # the paper's; or learned, rotary (softmax, sigmoid, feature maps), none
                n_positions=placeholder(int),  # learned: number of positions, at least sequence_length
                objective="next_token",  # or masked: a bidirectional model that fills in masked tokens
                dtype="float32",  # of matmul inputs; bfloat16 on accelerators
                remat="none",  # what is recomputed for the backward pass: none, full (layers), dots (all but matmuls)
                implementation=placeholder(str),  # of attention: chunked, pallas, scan, reference
                document_token=placeholder(int),  # resets the state at this id (gpt2: 50256, bytes: 256); None: never
            ),
            optimizer=dict(
                name="adamw",  # or muon: orthogonalized momentum for the layers' matrices, AdamW for everything else
                muon_multiple=3.0,  # muon: the rate of those matrices as a multiple of learning_rate
                learning_rate=6e-4,  # after warm-up
                final_learning_rate=6e-5,  # at the end of the cosine
                warmup_steps=2000,
                b1=0.9,
                b2=0.95,
                eps=1e-8,
                weight_decay=0.1,  # of matrices and embeddings only
                clip_norm=1.0,  # maximum global norm of the gradient; inf: none
            ),
            conversion=dict(  # of the softmax model in init_from: see configs/convert.py
                share=placeholder(float),  # of the steps, first, for its attention alone; None: no conversion
                attention_learning_rate=3e-2,  # in these steps
                window_starts=16,  # rotary positions: windows start at random places below so many windows; 0: at 0
                forget_gate=placeholder(str),  # the teacher's; None: as init_from says
                position=placeholder(str),  # the same
            ),
            log_every=10,  # steps
            validate_every=1000,  # steps, and at the end
            validation_tokens=1_000_000,  # at most, from the start of the split
            sample_tokens=0,  # with validations, let the model write so many tokens of a new document
            checkpoint_every=1000,  # steps, and at the end
            keep_checkpoints=3,  # number of newest checkpoints to keep
            keep_every=placeholder(int),  # also keep the checkpoint of every so many steps; None: no others
            trace_steps=placeholder(str),  # FIRST:LAST, steps to trace with jax.profiler into WORKDIR/trace; None: off
            wandb_project=placeholder(str),  # also log to Weights & Biases (pip install wandb); None: off
        )
    )

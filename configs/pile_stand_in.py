"""A small model of the paper's kind on GPT-2 tokens; learns something in 20 minutes on 2 CPU cores.

python scripts/build_corpus.py --out=corpus
python scripts/prepare_data.py --source='corpus/train-*' --tokenizer=gpt2 --split=train --out=data/pile_stand_in
python scripts/prepare_data.py --source=corpus/validation.jsonl.zst --tokenizer=gpt2 --split=validation \
    --out=data/pile_stand_in
python train.py --config=configs/pile_stand_in.py --workdir=runs/pile_stand_in
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.total_tokens = 600_000
    config.sequence_length = 128
    config.batch_size = 8
    config.data.path = "data/pile_stand_in"
    config.model.update(n_layers=4, d_model=128, n_heads=16, d_key=8, d_value=8)
    config.optimizer.update(learning_rate=5e-3, final_learning_rate=1e-4, warmup_steps=100)
    config.update(log_every=20, validate_every=200, validation_tokens=50_000, checkpoint_every=200)
    return config

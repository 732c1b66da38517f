r"""A small softmax model of bytes to convert (docs/conversion.md); trains in minutes on a laptop CPU.

python scripts/recall.py --task=associative --lengths=8,16,32 --texts=data/recall.jsonl
python scripts/recall.py --task=copy --lengths=8,16,32,64 --texts=data/copies.jsonl
python scripts/prepare_data.py data/recall.jsonl data/copies.jsonl --source=stdlib --split=train --tokenizer=bytes \
    --out=data/mix
python scripts/prepare_data.py --source=stdlib --split=validation --tokenizer=bytes --out=data/mix
python train.py --config=configs/softmax_demo.py --workdir=runs/softmax
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.update(total_tokens=6_500_000, sequence_length=256, batch_size=16)
    config.data.path = "data/mix"
    config.model.update(attention="softmax", block="gpt2", position="rotary", convolution=4, output_gate=True)
    config.model.update(n_layers=2, d_model=128, n_heads=4, d_key=32, d_value=32)
    config.optimizer.update(name="muon", learning_rate=4e-3, final_learning_rate=1e-4, warmup_steps=50)
    config.update(log_every=20, validate_every=500, validation_tokens=50_000, checkpoint_every=500)
    return config

"""SFT steps of TRL's SFTTrainer.

Options: `batch` rows a step, `steps` that are timed after one that is not, `rate`; `packing` puts
rows end to end into lines of so many tokens, best fit first, and a step is then one line.
"""

import os
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from tests.bench import cases
from tests.bench.sides import program


class _Timed(SFTTrainer):
    """Notes each step's loss, tokens, and when it began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.trained: list[int] = []
        self.began: list[float] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.began.append(time.perf_counter())
        self.trained.append(int((inputs["labels"] != -100).sum()))
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.append(float(loss))
        return loss


def work(case: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and gives each step's loss and the seconds of all timed ones."""
    batch, steps = options["batch"], options["steps"]
    rows = cases.read(case, "rows")[: batch * (steps + 1)]
    packing = options["packing"]
    trainer = _Timed(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            case / "model", dtype=torch.float32
        ),
        args=SFTConfig(
            output_dir=str(case / "trl"),
            per_device_train_batch_size=1 if packing else batch,
            num_train_epochs=1,
            learning_rate=options["rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            packing=bool(packing),
            packing_strategy="bfd",
            max_length=packing or 1024,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=_tokenizer(),
    )
    trainer.train()
    end = time.perf_counter()
    # TRL's packed lines come in an order of their own, so all of them are timed.
    first = 0 if packing else 1
    return {
        "seconds": {"steps": end - trainer.began[first]},
        "losses": trainer.losses,
        "trained": trainer.trained,
    }


def _tokenizer() -> Any:
    """TRL asks for one, though the rows are tokens already."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    program.run(work)

"""What the CPU trains and Transformer Engine's attention on GPUs does not."""

from service.spec.layout import Layout
from service.validation.fit import check_fit, check_kernels
from tests.service.validation.jobs import DENSE, model, spec

GPUS = {"gpus_per_node": 2}
WINDOWED = model(DENSE | {"model_type": "mistral"}, sliding_window=64)


def test_capped_attention_scores_need_the_cpu() -> None:
    gemma = {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    capped = model({**DENSE, **gemma}, attn_logit_softcapping=50.0)
    (problem,) = check_kernels(spec(resources=GPUS), Layout(), capped)
    assert problem.field == "resources.gpus_per_node"
    assert "a gemma2 model caps attention scores" in problem.message
    assert problem.fix == "use 0, which trains on the CPU, or another model"
    assert check_kernels(spec(), Layout(), capped) == []


def test_sliding_windows_do_not_go_round_gpus() -> None:
    asked = spec(resources=GPUS, training={"max_length": 128})
    (problem,) = check_fit(asked, Layout(cp=2), WINDOWED)
    assert problem.field == "parallel.cp"
    assert "see 64 tokens back" in problem.message
    assert problem.fix == "set cp to 1, or training.max_length to at most 64"
    assert check_fit(asked, Layout(), WINDOWED) == []
    assert check_fit(spec(training={"max_length": 128}), Layout(cp=2), WINDOWED) == []
    short = spec(resources=GPUS, training={"max_length": 64})
    assert check_fit(short, Layout(cp=2), WINDOWED) == []

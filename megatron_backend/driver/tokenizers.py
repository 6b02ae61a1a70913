"""The tokenizers of a job's models, and whether they speak of the same tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.errors import JobFailure
from megatron_backend.driver.job import Job
from service.spec import Reason
from service.spec.other_models import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_NAMES: dict[Role, str] = {"teacher": "teacher", "reward": "reward model", "critic": "critic"}


def load_tokenizer(folder: Path, *, of: str = "model") -> "PreTrainedTokenizerFast":
    """The tokenizer of a local folder.

    Args:
        folder: where it is.
        of: whose it is, for messages.

    Raises:
        JobFailure: USER_ERROR; the folder holds no fast tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise JobFailure(Reason.USER_ERROR, f"the {of}'s tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise JobFailure(
            Reason.USER_ERROR,
            f"the {of}'s tokenizer is a {type(tokenizer).__name__}; a fast one is needed "
            "(tokenizer.json)",
        )
    return tokenizer


def check_tokenizers(job: Job) -> None:
    """Refuses a teacher or a reward model whose token ids mean something else than the job's own.

    Needs no rank: call it before any is started.

    Raises:
        JobFailure: USER_ERROR.
    """
    for role in job.frozen_layouts:
        theirs = load_tokenizer(
            Path(job.context.other_models[role].tokenizer), of=MODEL_NAMES[role]
        )
        check_same_tokens(role, theirs, load_tokenizer(Path(job.context.model.tokenizer)))


def check_same_tokens(
    role: Role, theirs: "PreTrainedTokenizerFast", ours: "PreTrainedTokenizerFast"
) -> None:
    """Whether another model reads token ids as the trained one does.

    A teacher also proposes tokens, so it may know none that the student does not know. Rows that
    pad an embedding belong to no token, and may be more or fewer.

    Args:
        role: of the other model.
        theirs: its tokenizer.
        ours: the trained model's.

    Raises:
        JobFailure: USER_ERROR; an id stands for another token.
    """
    their_ids, our_ids = theirs.get_vocab(), ours.get_vocab()
    name = MODEL_NAMES[role]
    for token, number in sorted(our_ids.items(), key=lambda item: item[1]):
        if their_ids.get(token) != number:
            known = f"the {name} calls it {their_ids[token]}" if token in their_ids else None
            raise _others(name, f"{token!r} is {number} here; " + (known or f"the {name} has none"))
    if role == "teacher" and len(their_ids) > len(our_ids):
        token, number = min(their_ids.items() - our_ids.items(), key=lambda item: item[1])
        raise _others(name, f"{token!r} is {number} there, and is not known here")


def _others(name: str, example: str) -> JobFailure:
    return JobFailure(
        Reason.USER_ERROR,
        f"the {name} has another vocabulary than the model that is trained: {example}. Both must "
        f"give every token the same id; choose a {name} of the same family",
    )

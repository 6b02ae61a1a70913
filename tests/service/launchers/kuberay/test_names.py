import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.launchers.kuberay import names

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@given(st.text(min_size=1, max_size=300), st.integers(1, 99_999))
def test_g19_any_job_has_a_short_name_that_dns_takes(job_id: str, attempt: int) -> None:
    name = names.rayjob_name(job_id, attempt)
    assert len(name) <= 47
    assert DNS_LABEL.fullmatch(name)
    assert name == names.rayjob_name(job_id, attempt)
    assert len(names.job_label(job_id)) <= 63
    assert LABEL_VALUE.fullmatch(names.job_label(job_id))


def test_g19_jobs_that_begin_alike_have_names_and_labels_of_their_own() -> None:
    ids = [f"{'x' * 50}-{end}" for end in ("one", "two")] + ["x" * 70, "x" * 71, "X" * 50, "a.b"]
    attempts = [(job_id, attempt) for job_id in ids for attempt in (1, 11, 111)]
    assert len({names.rayjob_name(*each) for each in attempts}) == len(attempts)
    assert len({names.job_label(job_id) for job_id in ids}) == len(ids)


def test_a_launcher_id_can_be_read_back() -> None:
    assert names.parse_launcher_id(names.launcher_id("a/b", 3)) == ("a/b", 3)
    with pytest.raises(ValueError, match="invalid literal"):
        names.parse_launcher_id("no-attempt")

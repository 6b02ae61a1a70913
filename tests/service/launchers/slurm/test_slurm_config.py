import pytest

from service.launchers.slurm.config import SlurmCluster


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("options", ["--uid=0\n#"], "options"),
        ("options", ["-p gpu"], "write --option=value"),
        ("options", ["--output=/etc/x"], "set by the launcher"),
        ("options", ["--clusters=b"], "--clusters is set by the launcher"),
        ("options", ["--cluster-constraint=x"], "set by the launcher"),
        ("options", ["--get-user-env"], "set by the launcher"),
        ("options", ["--arr=1-5"], "--array is set by the launcher"),
        ("options", ["--cluster=b"], "--clusters is set by the launcher"),
        ("options", ["--wra=true"], "--wrap is set by the launcher"),
        ("env", {"PLANISH_ATTEMPT": "3"}, "set by the launcher"),
        ("env", {"a b": "3"}, "env"),
        ("python", "python3\nrm -rf ~", "python"),
        ("tunnel", {"type": "ssh", "host": "-oProxyCommand=x", "user": "u"}, "host"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(field: str, value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SlurmCluster.model_validate({field: value})


@pytest.mark.parametrize("option", ["--gpus=8", "--mail-type=FAIL", "--time-min=5", "--exclusive"])
def test_other_options_of_sbatch_are_an_operators_own(option: str) -> None:
    assert SlurmCluster(options=[option]).options == [option]

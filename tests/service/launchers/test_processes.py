import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from service.launchers.processes import Process, boot_id, is_alive, marked, send


def this_process() -> Process:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return Process(os.getpid(), int(fields[19]), boot_id())


def test_a_pid_that_came_back_is_another_process() -> None:
    me = this_process()
    assert is_alive(me)
    assert not is_alive(replace(me, start_ticks=me.start_ticks - 1))
    assert not is_alive(replace(me, boot_id="another boot"))


def test_a_signal_reaches_only_the_very_process() -> None:
    with subprocess.Popen(
        ["sleep", "600"], env={"PLANISH_JOB_ID": "job-signal-test", "PLANISH_ATTEMPT": "1"}
    ) as child:
        (process,) = marked("job-signal-test", 1)
        assert process.pid == child.pid
        send(replace(process, start_ticks=process.start_ticks + 1), signal.SIGKILL)
        assert child.poll() is None
        send(process, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
    assert not is_alive(process)
    send(process, signal.SIGKILL)


def test_marks_must_match_whole_and_a_zombie_is_dead() -> None:
    marks = {"PLANISH_JOB_ID": "job-marks-test", "PLANISH_ATTEMPT": "12"}
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, env=marks
    )
    assert [process.pid for process in marked("job-marks-test", 12)] == [child.pid]
    assert marked("job-marks-test", 1) == []
    assert marked("job-marks", 12) == []
    (process,) = marked("job-marks-test", 12)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process)
    assert marked("job-marks-test", 12) == []
    child.communicate()

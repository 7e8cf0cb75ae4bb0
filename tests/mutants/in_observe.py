"""Mutants of event files, metrics and the console."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OBSERVE = (
    Mutant(
        id="observe/weights-transposed",
        bug="the weights of a sync are written by replica, not by unit",
        file="observe/records.py",
        old='"weights": _table(decision.weights),',
        new='"weights": _table(decision.weights.t()),',
        test="pure/test_event_log.py::test_fields_of_a_sync",
    ),
    Mutant(
        id="observe/infinity-in-json",
        bug="an infinite norm is written as Infinity, which is no JSON",
        file="observe/records.py",
        old="not math.isfinite(value)",
        new="math.isnan(value)",
        test="pure/test_event_log.py::test_fields_of_a_sync",
    ),
    Mutant(
        id="observe/samples-are-steps",
        bug="the samples of a sync are written as its steps",
        file="observe/records.py",
        old='"samples": list(report.samples),',
        new='"samples": list(report.inner_steps),',
        test="pure/test_event_log.py::test_fields_of_a_sync",
    ),
    Mutant(
        id="observe/loss-one-late",
        bug="mean losses are written under the step after their own",
        file="observe/events.py",
        old="enumerate(losses, start=first_step)",
        new="enumerate(losses, start=first_step + 1)",
        test="pure/test_event_log.py::test_losses_stand_under_their_own_steps",
    ),
    Mutant(
        id="observe/earlier-overwritten",
        bug="the event files of the run before are numbered like those before them",
        file="observe/earlier.py",
        old="return 1 + max(",
        new="return max(",
        test="pure/test_event_log.py::test_files_of_a_run_get_one_number",
    ),
    Mutant(
        id="observe/earlier-left",
        bug="the event files of the run before are not moved: two runs are read as one",
        file="observe/events.py",
        old="            move_aside(files_to_move(",
        new="            list(files_to_move(",
        test="pure/test_event_log.py::test_files_of_a_run_get_one_number",
    ),
    Mutant(
        id="observe/speed-since-the-start",
        bug="tokens per second are means since the start of the run",
        file="observe/metrics.py",
        old="        self._last = now, samples\n",
        new="        self._last = self._last or (now, samples)\n",
        test="pure/test_event_log.py::test_speeds_are_since_the_sync_before",
    ),
    Mutant(
        id="observe/inside-bytes-of-one-step",
        bug="bytes inside a replica are those of one step, not of the round",
        file="observe/metrics.py",
        old="self.inside_bytes * report.inner_steps[0]",
        new="self.inside_bytes",
        test="pure/test_event_log.py::test_speeds_are_since_the_sync_before",
    ),
    Mutant(
        id="observe/console-not-restored",
        bug="after the detachment the process still writes to the replica's file",
        file="observe/console.py",
        old="            os.dup2(copy, number)\n",
        new="",
        test="pure/test_console.py::test_output_is_moved_and_given_back",
    ),
)

"""Mutants of settings, flags and exit codes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONFIG = (
    Mutant(
        id="config/momentum-one",
        bug="an outer momentum of 1 is accepted: it never decays",
        file="config.py",
        old='"in [0, 1)", lambda x: 0 <= x < 1)',
        new='"in [0, 1)", lambda x: 0 <= x <= 1)',
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/infinite-value",
        bug="infinite settings are accepted",
        file="config.py",
        old="(math.isfinite(value) and holds(value))",
        new="holds(value)",
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/delay-of-a-round",
        bug="a delay as long as the round is accepted: a unit would land after its next sync",
        file="config.py",
        old="if value >= config.sync_interval:",
        new="if value > config.sync_interval:",
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/replica-beyond",
        bug="a launch with a replica id of N is accepted: all wait for it in vain",
        file="config.py",
        old="config.replica_id >= (config.num_replicas or 0)",
        new="config.replica_id > (config.num_replicas or 0)",
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/inner-state-with-delay",
        bug="one inner state is accepted with delays, where replicas are never equal",
        file="config.py",
        old="if config.inner_state != ALL and not is_whole:",
        new='if config.inner_state == "leader" and not is_whole:',
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/port-zero",
        bug="a rendezvous at port 0 is accepted: each would listen somewhere else",
        file="flags.py",
        old="0 < int(port) < 65536",
        new="0 <= int(port) < 65536",
        test="pure/test_config.py::test_bad_values_get_one_line",
    ),
    Mutant(
        id="config/flags-without-use-edit",
        bug="--edit-* flags without --use-edit are ignored in silence: stock training",
        file="command_line.py",
        old="    if not config.use_edit:\n",
        new="    if False:\n",
        test="pure/test_config.py::test_flags_without_use_edit_are_refused",
    ),
    Mutant(
        id="config/diloco-clips",
        bug="strategies without a penalty clip their averages",
        file="config.py",
        old='("no_anomaly", "no_weighting", "no_clip")',
        new='("no_anomaly", "no_weighting")',
        test="pure/test_config.py::test_who_has_no_penalty_clips_nothing",
    ),
    Mutant(
        id="config/drift-exit-code",
        bug="drift ends a rank with 1, like any bug: scripts cannot tell",
        file="errors.py",
        old="exit_code = 3",
        new="exit_code = 1",
        test="pure/test_launcher.py::test_exit_codes_are_frozen",
    ),
    Mutant(
        id="config/lost-exit-code",
        bug="a lost replica ends a rank with 1, like any bug: batch scripts do not start it again",
        file="errors.py",
        old="exit_code = 4",
        new="exit_code = 1",
        test="pure/test_launcher.py::test_exit_codes_are_frozen",
    ),
    Mutant(
        id="config/refusal-exits-zero",
        bug="a refused command line ends with 0",
        file="launcher.py",
        old='    sys.stderr.write(f"megatron_edit: {error}\\n")\n    sys.stderr.flush()\n'
        "    return error.exit_code",
        new='    sys.stderr.write(f"megatron_edit: {error}\\n")\n    sys.stderr.flush()\n'
        "    return 0",
        test="pure/test_launcher.py::test_a_refusal_is_one_line_and_a_code",
    ),
    Mutant(
        id="config/script-exit-swallowed",
        bug="a training script that exits with a code ends the launcher with 0",
        file="launcher.py",
        old="                if stop.code:\n                    raise",
        new="                if stop.code is None:\n                    raise",
        test="pure/test_launcher.py::test_how_a_script_ends",
    ),
    Mutant(
        id="config/empty-file-of-entry",
        bug="a file without flags is taken for the flags of an entry of a comparison",
        file="tools/compare/entries.py",
        old='if not words or not words[0].startswith("--"):',
        new='if words and not words[0].startswith("--"):',
        test="pure/test_compare_plan.py::test_bad_files_of_entries",
    ),
    Mutant(
        id="config/path-in-label-of-entry",
        bug="an entry of a comparison is labelled with the whole path of its file",
        file="tools/compare/entries.py",
        old="FILE + Path(setting.removeprefix(FILE)).name",
        new="FILE + setting.removeprefix(FILE)",
        test="pure/test_compare_plan.py::test_entry_takes_flags_of_a_file",
    ),
)

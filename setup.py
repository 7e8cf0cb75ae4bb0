"""The part of the build that needs code; metadata and lists of files are in pyproject.toml."""

import os
import runpy
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py

template_files = runpy.run_path("megatron_edit/tools/templates.py")["template_files"]


class BuildWithTemplates(build_py):
    """Copies the files of `megatron-edit init` to megatron_edit/templates/ of the wheel."""

    def finalize_options(self) -> None:
        """Add these files to the package's data."""
        super().finalize_options()
        target = os.path.join(self.build_lib, "megatron_edit", "templates")
        self.data_files.append(("megatron_edit", "", target, list(template_files())))


# What a build writes stays out of this folder: a later build would take old files from build/ and
# from the list in *.egg-info.
with tempfile.TemporaryDirectory() as folder:
    setup(
        cmdclass={"build_py": BuildWithTemplates},
        options={
            "build": {"build_base": folder},
            "egg_info": {"egg_base": folder, "ignore_egg_info_in_manifest": True},
        },
    )

"""Packaging of megatron_edit. Tool configuration is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# The oldest that megatron-core 0.19 accepts is 2.6; `megatron_edit.versions` has the same number.
# constraints.txt pins what our own tests run with.
TORCH = "torch>=2.6"

setup(
    name="megatron_edit",
    version="0.2.0",
    description="The EDiT distributed optimizer (arXiv 2412.07210) for Megatron-LM",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_edit", "megatron_edit.*"]),
    package_data={"megatron_edit": ["py.typed", "tools/*/*.html"]},
    install_requires=[
        TORCH,
        "megatron-core>=0.19.0,<0.20",
        "numpy>=1.26",
        "einops>=0.8",  # megatron-core needs it for several optimizer instances
        "psutil>=6",
    ],
    extras_require={
        "test": [
            "build>=1.2",
            "pytest>=8.3,<10",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",  # scripts/test.sh runs files side by side
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "selenium>=4.20",  # pages are looked at in Chromium, where there is one
            "pybind11>=2.13",  # a clone of Megatron-LM compiles its dataset helper with it
        ],
        "report": [
            "jinja2>=3.1",
            "matplotlib>=3.9",
            "rich>=13.7",
            "tensorboard>=2.16",  # for Megatron's --tensorboard-dir
            "tokenizers>=0.20",
            "tqdm>=4.66",
        ],
        "dev": ["pre-commit>=4"],
        # For Megatron's --optimizer muon. A later version renames what Megatron 0.19 imports.
        "muon": ["emerging-optimizers>=0.3,<0.5", "absl-py>=2"],
        # What benchmarks/overlap.py measures beside EDiT; nothing of ours uses it.
        "rival": ["torchft-nightly==2026.10.26"],
        # NVIDIA Apex is not on the package index: docs/install.md.
        "gpu": ["transformer-engine[pytorch]>=2.1"],
    },
    entry_points={"console_scripts": ["megatron-edit=megatron_edit.tools.cli:main"]},
)

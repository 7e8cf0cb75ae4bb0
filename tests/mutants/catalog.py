"""All mutants, by the area of the package."""

from __future__ import annotations

from tests.mutants.in_checkpoint import CHECKPOINT
from tests.mutants.in_comm import COMM
from tests.mutants.in_config import CONFIG
from tests.mutants.in_elastic import ELASTIC
from tests.mutants.in_engine import ENGINE
from tests.mutants.in_host import HOST
from tests.mutants.in_method import METHOD
from tests.mutants.in_observe import OBSERVE
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *METHOD, *COMM, *ENGINE, *ELASTIC, *CHECKPOINT, *OBSERVE, *CONFIG, *HOST
)  # fmt: skip

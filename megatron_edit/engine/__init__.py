"""The engine: phases, rounds and syncs of one rank. It reaches its host only through a protocol.

`EditEngine` is the entry point. Other packages import only the names listed here.
"""

from megatron_edit.engine.engine import EditEngine as EditEngine
from megatron_edit.engine.host import TIED_EMBEDDING as TIED_EMBEDDING
from megatron_edit.engine.host import EngineGroups as EngineGroups
from megatron_edit.engine.host import Host as Host
from megatron_edit.engine.host import Progress as Progress
from megatron_edit.engine.host import Reporter as Reporter
from megatron_edit.engine.host import SyncReport as SyncReport
from megatron_edit.engine.membership import Membership as Membership
from megatron_edit.engine.membership import Transports as Transports
from megatron_edit.engine.plan import RoundState as RoundState
from megatron_edit.engine.rounds.completion import SavedRound as SavedRound
from megatron_edit.engine.rounds.elastic import ElasticParts as ElasticParts
from megatron_edit.engine.saved import EngineState as EngineState
from megatron_edit.engine.saved import PendingState as PendingState
from megatron_edit.engine.saved import UnitTensors as UnitTensors
from megatron_edit.engine.settings import EngineSettings as EngineSettings
from megatron_edit.engine.shared_state import SharedState as SharedState
from megatron_edit.engine.shared_state import round_state as round_state
from megatron_edit.engine.shared_state import saved_rounds as saved_rounds
from megatron_edit.engine.status import EngineStatus as EngineStatus
from megatron_edit.engine.units import ParamShard as ParamShard
from megatron_edit.engine.units import ShardAccessor as ShardAccessor
from megatron_edit.engine.units import UnitPlan as UnitPlan
from megatron_edit.engine.units import UnitShard as UnitShard
from megatron_edit.engine.units import forward_order as forward_order
from megatron_edit.engine.units import plan_units as plan_units

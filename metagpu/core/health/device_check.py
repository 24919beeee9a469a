"""The device check: one GPU's present condition."""

from metagpu.core.contracts.driver import Driver, GpuCondition
from metagpu.core.errors import DriverError, DriverUnavailable
from metagpu.core.health.rules import fault_kind, judge_condition
from metagpu.core.model.gpu import GpuId
from metagpu.core.model.shares import Fault


async def find_problem(driver: Driver, gpu: GpuId) -> tuple[str, Fault] | None:
    """Check a GPU's condition; return its problem and fault, `None` when healthy."""
    try:
        condition = await driver.condition(gpu)
    except DriverUnavailable:
        raise
    except DriverError as error:
        return reason_beside(gpu, str(error)), Fault.NO_ANSWER
    problem = judge_condition(condition)
    return None if problem is None else (problem, fault_kind(condition))


def reason_beside(gpu: GpuId, message: str) -> str:
    """Return a message without its GPU: a verdict is shown beside the GPU."""
    return message.rpartition(f"({gpu}): ")[2]


async def read_condition(driver: Driver, gpu: GpuId) -> GpuCondition | None:
    """Read a GPU's condition; return `None` where the GPU does not answer."""
    try:
        return await driver.condition(gpu)
    except DriverUnavailable:
        raise
    except DriverError:
        return None

"""Many coroutines at the same time from ordinary code: episodes that wait for services, say a reward model.

python examples/task_runner/many.py
"""

import asyncio

from embodrl import AsyncTaskRunner


async def score(number: int) -> float:
    """Stand in for a request to a reward model."""
    await asyncio.sleep(0.01)
    return number / 10.0


def main() -> None:
    """Submit ten tasks, four at a time, and wait for all of them."""
    with AsyncTaskRunner(max_in_flight=4, max_queue_size=10) as runner:
        for number in range(10):
            runner.submit(score, number)
        results = runner.wait(count=10, timeout=10.0)
    print("scores:", sorted(result.value for result in results if result.status == "ok"))


if __name__ == "__main__":
    main()

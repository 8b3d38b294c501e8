"""One iteration at a time: what tests of scheduling rules ask for and look at."""

from tests.toy import toy_request
from xylite.runtime.commit import commit
from xylite.runtime.request import SamplingParams


def ask(driver, name, prompt, max_tokens=4, *, priority=0, cache_salt="", **params):
    request = toy_request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params),
        priority=priority,
        cache_salt=cache_salt,
    )
    driver.add(request)
    return request


def chunks(plan):
    return [(c.seq.request.id, c.start, c.num) for c in plan.chunks]


def step(driver, *, ahead=False):
    """Plan one iteration, run it and commit it."""
    plan, made = driver.plan(ahead=ahead)
    for seq, event in commit(driver.queues, plan, driver.executor.run(made)):
        driver.events[seq.request.id, seq.index].append(event)
    driver.check()
    return plan

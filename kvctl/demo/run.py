"""The demo from one end to the other: model, reference, pair, traffic, figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvctl.demo import prompts as demo_prompts
from kvctl.demo import setting as demo_setting
from kvctl.demo.compare import Answer, compare
from kvctl.demo.model import SERVED_NAME, tiny_model
from kvctl.demo.pair import Pair, demo_folder, refuse_second, running_pair
from kvctl.demo.reference import Question, pins_of, reference_answers
from kvctl.demo.report import Report, make_report
from kvctl.demo.setting import Setting, setting_for
from kvctl.demo.steps import Display, Say
from kvctl.demo.traffic import Exchange, send_all
from kvctl.engine.environment import ROUTER, EngineEnvironment, find, nixl_remedy
from kvctl.engine.hardware import visible_gpus
from kvctl.engine.requirements import PINS
from kvctl.errors import InstanceError, UnreachableError, UsageError
from kvctl.sources.feed import Watch

FEED_TIMEOUT = 10.0  # seconds until both feeds are followed; they are open before the pair is ready
SETTLE_TIMEOUT = 3.0  # seconds after the last answer in which the engines may report the rest


@dataclass
class Outcome:
    """What a demo came to.

    Attributes:
        code: of the launch; not 0 when a signal ended it: then there is no report.
        seconds: that each step took.
    """

    engine: EngineEnvironment
    report: Report | None = None
    pair: Pair | None = None
    code: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def run(*, count: int, engine: str | None, keep: bool, display: Display) -> Outcome:
    """Runs the demo. Whatever happens, nothing is left running, unless it is to be kept.

    Args:
        count: of prompts.
        engine: Python of the engine's environment; None: found, see `find`.
        keep: leave the pair running once the figures are there.

    Raises:
        KvctlError: something that it needs is missing, or failed.
    """
    if count < demo_prompts.FEWEST:
        raise UsageError(
            f"--prompts {count}: too few to fill the device cache and force a reload",
            hint=f"at least {demo_prompts.FEWEST}",
        )
    refuse_second()
    environment = _environment(engine)
    setting = setting_for(environment.platform, gpus=visible_gpus())
    outcome = Outcome(environment)
    log = demo_folder() / "logs"
    python = environment.python
    display.note(_described(environment))
    with _step(display, outcome, "model"):
        model = tiny_model(python, log=log / "model.log")
    prompts = demo_prompts.make_prompts(count)
    question = Question(
        prompts,
        setting.reference_arguments(),
        setting.reference_env(),
        environment.platform,
        pins_of(python),
    )
    with _step(display, outcome, "reference"):
        expected = reference_answers(
            question, model=model, python=python, log=log / "reference.log"
        )
    began = time.monotonic()
    with running_pair(setting, model=model, engine=environment, keep=keep, display=display) as (
        outcome.code,
        outcome.pair,
    ):
        outcome.seconds["start"] = time.monotonic() - began
        if outcome.pair:
            with _step(display, outcome, "traffic") as say:
                outcome.report = _measure(outcome.pair, setting, prompts, expected, say)
    return outcome


def _environment(engine: str | None) -> EngineEnvironment:
    """The engine's environment; what a launch would miss in it is said before anything runs."""
    environment = find(engine)
    if environment.nixl is None:
        raise UnreachableError(
            f"the environment of {environment.python} has vLLM and no NIXL",
            hint=nixl_remedy(environment),
        )
    if environment.router is None:
        raise UnreachableError(
            "there is no program vllm-router",
            hint=f"install it in an environment of its own (pip install -r {PINS / 'router.txt'}) "
            f"and name the program by {ROUTER}",
        )
    return environment


def _described(environment: EngineEnvironment) -> str:
    return (
        f"engines: vLLM {environment.vllm} with NIXL {environment.nixl} on "
        f"{environment.platform}, from {environment.python}"
    )


@contextlib.contextmanager
def _step(display: Display, outcome: Outcome, what: str) -> Iterator[Say]:
    began = time.monotonic()
    with display.step(what) as say:
        yield say
    outcome.seconds[what] = time.monotonic() - began


def _measure(
    pair: Pair,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Answer],
    say: Say,
) -> Report:
    """Sends everything while both feeds are followed, and puts the report together."""
    visits = demo_prompts.make_schedule(len(prompts))
    done: list[Exchange] = []

    def on_done(exchange: Exchange) -> None:
        done.append(exchange)
        say(f"{len(done)} of {len(visits)} requests")

    with Watch(pair.feeds) as watch:
        if not watch.wait_for(lambda: not watch.problems(), FEED_TIMEOUT):
            raise InstanceError(
                "the engines run, and what they report cannot be read:\n"
                + "\n".join(f"  {problem}" for problem in watch.problems().values()),
                hint="the engines' logs say why: kvctl logs -p demo",
            )
        say(f"0 of {len(visits)} requests")
        exchanges = send_all(
            visits,
            prompts,
            url=pair.url,
            model=SERVED_NAME,
            clients=demo_setting.CLIENTS,
            deadline=demo_setting.DEADLINE,
            on_done=on_done,
        )
        say("waiting for the last reports")
        watch.wait_for(lambda: _nothing_in_flight(watch), SETTLE_TIMEOUT)
        comparisons = {
            index: compare(expected[each.visit.prompt], each.answer, bound=setting.bound)
            for index, each in enumerate(exchanges)
            if each.answer
        }
        return make_report(
            planned=len(visits),
            exchanges=exchanges,
            comparisons=comparisons,
            bound=setting.bound,
            snapshots=watch.snapshots().values(),
            transfers=watch.transfers(),
            waits=watch.waits(),
            lost=watch.lost(),
            unread=watch.problems().values(),
        )


def _nothing_in_flight(watch: Watch) -> bool:
    return not any(
        moved.inflight for engine in watch.snapshots().values() for moved in engine.transfers
    )

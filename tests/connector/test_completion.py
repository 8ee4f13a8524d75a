from kvctl_connector.completion import CompletionMap, Released

NIXL, OFFLOAD = 0, 1


def report(
    completion: CompletionMap, child: int, received: set[str], failed: set[str] = frozenset()
) -> Released:
    released = Released()
    completion.report(child, received, failed, released)
    return released


def test_a_load_completes_once_when_its_child_reports() -> None:
    completion = CompletionMap()
    completion.expect({"a": (NIXL,)})

    assert report(completion, NIXL, {"a"}).received == {"a"}
    assert report(completion, NIXL, {"a"}).received == set()
    assert completion.strays == 1


def test_what_nobody_announced_is_dropped_and_counted() -> None:
    completion = CompletionMap()

    released = report(completion, NIXL, {"stranger"}, {"other stranger"})

    assert (released.received, released.failed) == (set(), set())
    assert completion.strays == 2


def test_a_child_that_was_not_loading_cannot_complete_a_request() -> None:
    completion = CompletionMap()
    completion.expect({"a": (NIXL,)})

    assert report(completion, OFFLOAD, {"a"}).received == set()
    assert completion.strays == 1
    assert report(completion, NIXL, {"a"}).received == {"a"}


def test_a_composed_load_waits_for_all_its_children() -> None:
    completion = CompletionMap()
    completion.expect({"a": (NIXL, OFFLOAD)})

    assert report(completion, OFFLOAD, {"a"}).received == set()
    assert report(completion, NIXL, {"a"}).received == {"a"}
    assert len(completion) == 0


def test_a_failure_of_one_child_is_reported_when_the_last_one_is_done() -> None:
    completion = CompletionMap()
    completion.expect({"a": (NIXL, OFFLOAD)})

    assert report(completion, NIXL, {"a"}, {"a"}).received == set()
    released = report(completion, OFFLOAD, {"a"})

    assert (released.received, released.failed) == ({"a"}, {"a"})


def test_a_second_attempt_starts_afresh() -> None:
    completion = CompletionMap()
    completion.expect({"a": (NIXL, OFFLOAD)})
    report(completion, NIXL, set(), {"a"})
    completion.expect({"a": (OFFLOAD,)})  # the failed pull was recomputed or moved to a tier

    released = report(completion, OFFLOAD, {"a"})

    assert (released.received, released.failed) == ({"a"}, set())

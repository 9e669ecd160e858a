"""The control link: messages of any size arrive whole and in order, and a peer that is gone is noticed."""

import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nanollm.config import EngineConfig
from nanollm.engine.scheduler import Scheduler
from nanollm.engine.sequence import Sequence, check_token_ids
from nanollm.runtime.channel import TOKEN_BYTES, Kind, Link, LinkClosedError, Listener, connect
from nanollm.runtime.ranks import failures_told
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    ours, theirs = (Link(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_messages_of_any_size_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    sizes = [0, 1, 3, 2**20 - 16, 2**20, 5 * 2**20 + 7, 0]
    payloads = [os.urandom(size) for size in sizes]
    sender = in_thread(lambda: [ends[0].send(Kind(i % 5), payload) for i, payload in enumerate(payloads)])
    for i, payload in enumerate(payloads):
        assert ends[1].recv(10) == (Kind(i % 5), payload)
    assert ends[1].recv(0) is None
    sender.join()


def test_waiting_for_a_peer_ends_in_time(ends: tuple[Link, Link]) -> None:
    started = time.monotonic()
    assert ends[0].recv(0.2) is None
    with pytest.raises(TimeoutError, match=r"took no message for 0.2 s"):
        for _ in range(100):  # more than the kernel buffers
            ends[0].send(Kind.PLAN, bytes(2**20), timeout=0.2)
    assert 0.4 < time.monotonic() - started < 5


def test_what_was_sent_before_the_end_is_still_received(ends: tuple[Link, Link]) -> None:
    ends[0].send(Kind.ERROR, b"why")
    ends[0].close()
    assert ends[1].recv() == (Kind.ERROR, b"why")
    for call in (ends[1].recv, lambda: ends[1].send(Kind.PLAN), lambda: ends[1].send(Kind.PLAN)):
        with pytest.raises(LinkClosedError):
            call()


def test_a_failure_is_told_whatever_it_quotes(ends: tuple[Link, Link]) -> None:
    with pytest.raises(ValueError, match="bad \ud800"), failures_told(ends[0]):
        raise ValueError("bad \ud800")
    message = ends[1].recv(1)
    assert message is not None and message[1].endswith(b"ValueError: bad \\ud800\n")


def test_something_else_than_our_messages_is_refused() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with ours, theirs, pytest.raises(LinkClosedError, match="something else"):
        Link(ours).recv(1)


def test_a_process_with_more_open_files_than_select_can_do() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    low = socket.socketpair()
    high = [socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD, 2000)) for end in low]
    ours, theirs = (Link(end) for end in high)
    assert ours.recv(0.01) is None
    theirs.send(Kind.START, b"x")
    assert ours.recv(1) == (Kind.START, b"x")
    for end in (*low, *high):
        end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_listener_takes_the_ranks_that_know_the_secret_and_nobody_else() -> None:
    listener = Listener("127.0.0.1")
    address = ("127.0.0.1", listener.port)
    strangers = [socket.create_connection(address) for _ in range(2)]
    strangers[0].sendall(bytes(TOKEN_BYTES + 4))
    strangers[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    strangers[1].close()  # with a reset
    links: dict[int, Link] = {}
    ranks = [
        in_thread(lambda rank=rank: links.update({rank: connect(*address, listener.token, rank, 5.0)}))
        for rank in (2, 1)
    ]
    accepted = listener.accept(2, 5.0)
    for thread in ranks:
        thread.join()
    assert sorted(accepted) == [1, 2]
    for rank, link in links.items():
        accepted[rank].send(Kind.START, bytes([rank]))
        assert link.recv(5) == (Kind.START, bytes([rank]))
    with pytest.raises(TimeoutError, match=r"1 of 1 ranks did not connect in 0.1 s"):
        listener.accept(1, 0.1)
    listener.close()


def run_requests(prompts: list[list[int]], ends: tuple[Link, Link], **settings: int) -> list[StepPlan]:
    """Schedule the prompts for 2 tokens each; every plan crosses the link, and this is what arrives."""
    config = EngineConfig("none", num_kv_blocks=8192, **settings)
    scheduler = Scheduler(config, 8192, max_model_len=131072)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        ids = check_token_ids(prompt, 2000)
        scheduler.add(Sequence(i, ids, params, seed=0, eos_token_ids=(), max_model_len=131072, arrival_time=0.0))
    plans: list[StepPlan] = []

    def receive() -> None:
        while (message := ends[1].recv(10)) is not None and message[0] is Kind.PLAN:
            plans.append(StepPlan.unpack(np.frombuffer(message[1], np.int32), len(plans)))

    receiver = in_thread(receive)
    while (step := scheduler.schedule()) is not None:
        ends[0].send(Kind.PLAN, step.plan.pack())
        scheduler.update(step, StepResult([7] * len(step.sampled)), 0.0)
    ends[0].send(Kind.CLOSE)
    receiver.join()
    return plans


def test_a_prompt_of_100000_tokens_goes_in_chunks_whose_plans_hold_the_chunk(ends: tuple[Link, Link]) -> None:
    prompt = [i % 997 for i in range(100_000)]
    plans = run_requests([prompt], ends, max_num_batched_tokens=1024)
    assert [token for plan in plans[:98] for token in plan.host_tokens.tolist()] == prompt
    assert [plan.num_tokens for plan in plans] == [1024] * 97 + [672, 1]
    # The block table of the whole prompt goes with the first chunk.
    assert len(plans[0].pack()) < 1024 + 100_000 // 16 + 64
    assert max(len(plan.pack()) for plan in plans[1:]) < 1024 + 64


def test_200_prompts_that_share_a_prefix_send_it_once(ends: tuple[Link, Link]) -> None:
    prefix = [i % 991 for i in range(3840)]
    prompts = [[*prefix, *(1000 + (i * j) % 503 for j in range(16))] for i in range(1, 201)]
    plans = run_requests(prompts, ends, max_num_batched_tokens=4096, max_num_seqs=256)
    num_tokens = sum(plan.num_tokens for plan in plans)
    assert num_tokens < 2 * 3856 + 200 * 32  # not 200 × 3,856
    assert max(plan.pack().nbytes for plan in plans) < 300_000  # 200 block tables of 241 blocks
    assert max(len(plan.row_ids_B) for plan in plans) >= 199


def test_a_hangup_of_the_other_side_is_told_and_our_own_is_not(ends: tuple[Link, Link]) -> None:
    told = [threading.Event(), threading.Event()]
    for link, event in zip(ends, told, strict=True):
        link.on_hangup(event.set)
    ends[0].close()
    assert told[1].wait(10)
    ends[1].close()
    assert not told[0].is_set()
    assert not any(thread.name == "nanollm-hangup" for thread in threading.enumerate())


def test_spinning_does_not_sleep(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    def send_soon() -> None:
        time.sleep(0.05)
        ends[0].send(Kind.PLAN, b"soon")

    later = in_thread(send_soon)
    monkeypatch.setattr(ends[1], "_poll", None)
    assert ends[1].recv(10, spin=5.0) == (Kind.PLAN, b"soon")
    later.join()


def test_spinning_takes_messages_and_ends_in_time_and_then_sleeps(ends: tuple[Link, Link]) -> None:
    def send_soon() -> None:
        time.sleep(0.05)
        ends[0].send(Kind.PLAN, b"soon")

    later = in_thread(send_soon)
    assert ends[1].recv(10, spin=5.0) == (Kind.PLAN, b"soon")
    later.join()
    start = time.monotonic()
    assert ends[1].recv(0.1, spin=5.0) is None
    assert time.monotonic() - start < 3
    busy = time.process_time()
    assert ends[1].recv(1.0, spin=0.02) is None
    assert time.process_time() - busy < 0.5
    ends[0].close()
    with pytest.raises(LinkClosedError):
        ends[1].recv(spin=5.0)

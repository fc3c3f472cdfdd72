# SPDX-License-Identifier: Apache-2.0
"""The processes of a run meet: here as threads, over real sockets."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxmoe.cluster import Place
from jaxmoe.config import ConfigError
from jaxmoe.roll_call import Arrival, StartError, differences, meet


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def place_of(number, count, port):
    return Place(
        coordinator=f"127.0.0.1:{port}",
        num_processes=count,
        process_id=number,
        local_devices=None,
        source="test",
    )


def outcomes(callers, count, timeout_s=10.0):
    """What `meet` gives or raises for each (number, facts, seconds of delay)."""
    port = free_port()

    def call(number, facts, delay_s=0.0):
        time.sleep(delay_s)
        try:
            return meet(place_of(number, count, port), facts, timeout_s)
        except (ConfigError, StartError) as error:
            return error

    with ThreadPoolExecutor(len(callers)) as pool:
        futures = [pool.submit(call, *caller) for caller in callers]
        return [future.result() for future in futures]


def test_all_come_in_any_order():
    """Process 0 may be the last; it gets all, in order, and the port is free again."""
    same = {"MoE.top_k": "2"}
    first, *others = outcomes([(0, same, 0.3), (2, same), (1, same, 0.1)], 3)
    assert [each.process_id for each in first] == [0, 1, 2]
    assert [each[0].process_id for each in others] == [2, 1]
    assert all(each.facts["MoE.top_k"] == "2" for each in first)


def test_differences_stop_all_with_one_message():
    """Who has which value, for every field that differs; all get the same text."""
    facts = {"MoE.top_k": "2", "Train.seed": "0", "jax": "1"}
    other = facts | {"Train.seed": "1", "jax": "2"}
    found = outcomes([(0, facts), (1, facts), (2, other), (3, facts | {"jax": "3"})], 4)
    texts = {str(error) for error in found}
    assert len(texts) == 1 and all(type(error) is ConfigError for error in found)
    lines = texts.pop().splitlines()
    host = socket.gethostname()
    assert f"  Train.seed is 0 in processes 0-1, 3, 1 in process 2 ({host})" in lines
    assert any(
        line.startswith("  jax is 1 in processes 0-1, 2 in process 2") for line in lines
    )
    assert "MoE.top_k" not in "".join(lines)


def test_a_missing_process_is_named():
    """Within the time, and to all who came; exit code 1, as nothing is wrong with the
    command."""
    before_s = time.monotonic()
    found = outcomes([(0, {}), (2, {})], 4, timeout_s=0.5)
    assert time.monotonic() - before_s < 5
    assert all(type(error) is StartError for error in found)
    assert "2 of 4 processes arrived" in str(found[0])
    assert "missing: processes 1, 3" in str(found[0])
    assert str(found[0]) == str(found[1])


def test_without_process_0():
    [error] = outcomes([(1, {})], 2, timeout_s=0.5)
    assert type(error) is StartError
    assert "process 0 did not answer at 127.0.0.1:" in str(error)
    assert "this is process 1 of 2" in str(error)


def test_two_processes_with_one_number():
    found = outcomes([(0, {}), (1, {}, 0.2), (1, {}, 0.4)], 3, timeout_s=5.0)
    assert all(type(error) is ConfigError for error in found)
    assert all("two processes have the number 1" in str(error) for error in found)


def test_another_number_of_processes():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        places = [place_of(0, 2, port), place_of(1, 3, port)]
        futures = [pool.submit(meet, place, {}, 5.0) for place in places]
        for future in futures:
            with pytest.raises(ConfigError, match="the number of processes is 2 in"):
                future.result()


def test_strangers_and_those_who_started_again():
    """Who says something else, or nothing, is not counted; who waited and has gone may
    come again."""
    port = free_port()

    def say(text):
        while True:
            try:
                line = socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                time.sleep(0.01)
                continue
            line.sendall(text)
            return line

    facts = b'{"the number of processes": "3"}'
    hello = b'{"greeting":"jaxmoe","process_id":1,"host":"b","pid":%d,"facts":'
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, place_of(0, 3, port), {}, 10.0)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"greeting": "jaxmoe"}\n'):
            say(text).close()
        say(hello % 11 + facts + b"}\n").close()
        with say(hello % 12 + facts + b"}\n"):
            pool.submit(meet, place_of(2, 3, port), {}, 10.0).result()
            assert [each.pid for each in first.result()][1] == 12


def test_a_port_in_use_is_a_mistake():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at port {port}"):
            meet(place_of(0, 2, port), {}, 5.0)


def test_many_differences_are_cut():
    a = Arrival(0, "a", 1, {f"f{n}": "1" for n in range(30)})
    b = Arrival(1, "b", 1, {f"f{n}": "2" for n in range(30)})
    lines = differences([a, b])
    assert lines[0] == "f0 is 1 in process 0 (a), 2 in process 1 (b)"
    assert lines[-1] == "and 10 more"
    only = Arrival(1, "b", 1, {"f0": "1"})
    assert "f1 is 1 in process 0 (a), absent in process 1 (b)" in differences([a, only])

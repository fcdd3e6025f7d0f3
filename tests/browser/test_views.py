"""Every view shows what the API says, live, and says so when there is nothing to show."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest

from select_service.types.common_fields import weight_text
from tests.browser.fleet import BIG, book, call, publish, register
from tests.browser.tab import Tab
from tests.live.engine import FakeEngine
from tests.live.ports import free_port
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_fleet_is_what_loads_says_and_follows_it(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, BIG)
    register(
        server,
        2,
        data_parallel_size=2,
        kv_events_endpoint=None,
        kv_events_endpoints={"0": "tcp://127.0.0.1:9", "1": "tcp://127.0.0.1:9"},
        model_name="llama",
        tenant_id="acme",
    )
    register(server, 3, endpoint=None)
    book(server, "a", 640)
    book(server, "b", 96, model_name="llama", tenant_id="acme")
    page = tab(server)
    page.open("fleet")
    _same_as_loads(server, page)
    rows = page.rows("fleet")
    assert rows[f"{BIG}/0"]["Worker · rank"] == str(BIG), "to the last digit"
    assert rows["3"]["Lifecycle"] == "incomplete"
    assert rows["2/1"]["Model · tenant"] == "llama · acme"
    assert page.text("[data-card=workers] b") == "2 of 3"
    # live: nothing is loaded again
    book(server, "c", 160, allowed_worker_ids=[BIG])
    page.until(f'[data-key="{BIG}/0"]', "50 of 1,000")
    _same_as_loads(server, page)
    call(server, "POST", f"/workers/{BIG}/metrics", {"ranks": [{"kv_used_blocks": 900}]})
    page.until(f'[data-key="{BIG}/0"]', "900 of 1,000")
    call(server, "DELETE", "/workers/3")
    page.page.wait_for_selector('[data-key="3"]', state="detached")
    register(server, 4)
    page.page.wait_for_selector('[data-key="4/0"]')
    assert page.text("[data-vital=reservations] dd") == "3"


def _same_as_loads(server: Server, page: Tab) -> None:
    shown = {
        key: (
            number(row["Prefill tokens"]),
            number(row["KV blocks"].split(" of ")[0]),
            number(row["Requests"]),
        )
        for key, row in page.rows("fleet").items()
        if "/" in key
    }
    expected = {
        f"{row['worker_id']}/{row['dp_rank']}": (
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        )
        for scope in call(server, "GET", "/loads")
        for row in scope["loads"]
    }
    assert shown == expected


def test_fleet_shows_events_gaps_and_the_index(serve: Serve, tab: Tabs) -> None:
    server = serve()
    page = tab(server)
    with FakeEngine(free_port()) as engine:
        register(server, 1, kv_events_endpoint=engine.endpoint)
        page.open("fleet")
        page.until('[data-key="1/0"]', "silent")
        page.until("[data-card=events] b", "0 of 1 heard")
        sent_at = time.time() - 300
        publish(engine, 0, list(range(64)), 100, sent_at)
        page.until('[data-key="1/0"]', "current")
        page.until("[data-card=events] b", "in order")
        row = page.rows("fleet")["1/0"]
        assert (row["Cached blocks"], row["Gaps · lost"]) == ("4", "0 · 0")
        assert row["Last event"].startswith("5 min")
        page.until('[data-key="1/0"] > :nth-child(11)', "0 s")  # later than itself it is not
        # later than the first by all that has passed since; more would be a clock that was set
        publish(engine, 5, list(range(500, 532)), 200, sent_at - 0.9)
        page.until('[data-key="1/0"]', "uncertain")  # nobody can be asked for what is missing
        row = page.rows("fleet")["1/0"]
        assert (row["Cached blocks"], row["Gaps · lost"]) == ("6", "1 · 4")
        assert page.text("[data-card=events] b") == "1 in trouble"
        number = 6  # the lag of who says no more is over when that has passed: it goes on
        while page.rows("fleet")["1/0"]["Lag"] in {"0 s", "unknown"}:
            publish(engine, number, list(range(16)), 1000 + number, sent_at - 0.9)
            number += 1
            assert number < 100
            page.page.wait_for_timeout(200)
        assert page.rows("fleet")["1/0"]["Lag"].endswith("s")


def test_a_worker_has_a_page_with_what_it_was_chosen_for(serve: Serve, tab: Tabs) -> None:
    server = serve()
    page = tab(server)
    tokens = list(range(64))
    with FakeEngine(free_port()) as engine:
        register(server, BIG, kv_events_endpoint=engine.endpoint)
        page.open(f"worker/{BIG}")
        page.until("[data-table=ranks]", "silent")
        publish(engine, 0, tokens[:48], 100, time.time())
        page.until("[data-table=ranks]", "current")

        def select() -> None:
            call(server, "POST", "/select", {"token_ids": tokens})

        page.until_while(
            select,
            "() => /[1-9].*s · 75 %/.test(document.querySelector('[data-table=ranks]').innerText)",
        )
        page.until_while(
            select,
            """() => document.querySelector('[data-value=hitRate]').innerText === '75 %'
            && /[1-9].*\\/s$/.test(document.querySelector('[data-value=selections]').innerText)""",
        )
        assert page.flaws() == []
        call(server, "DELETE", f"/workers/{BIG}")
        page.page.wait_for_selector("[data-empty=no-worker]")
    page.complaints = [one for one in page.complaints if "404" not in one]  # it was just asked for


def test_decisions_are_explained(serve: Serve, tab: Tabs) -> None:
    server = serve()
    for worker_id in (1, 2, 3, BIG):
        register(server, worker_id)
    call(server, "POST", "/workers/3/drain", {})
    book(server, "load", 640, allowed_worker_ids=[1])
    book(server, "why", 64, allowed_worker_ids=[1, BIG])
    decision = call(server, "GET", "/decisions/why")
    page = tab(server)
    page.open("decisions")
    page.find("[data-decision=why]").click()
    page.until("#decision-title", "why")
    verdict = page.text("#verdict")
    chosen = decision["chosen"]
    assert f"Worker {BIG} · 0" in verdict
    assert f"({chosen['cost']:.2f} blocks)" in verdict
    assert f"{chosen['margin']:.2f} blocks cheaper than worker 1 · 0" in verdict
    for one in decision["candidates"]:
        rank = page.find(f'[data-rank="{one["worker_id"]}/{one["dp_rank"]}"]')
        if one["excluded"]:
            assert rank.locator("s").inner_text() == f"{one['worker_id']} · {one['dp_rank']}"
            assert one["excluded"] in rank.inner_text()
        else:
            assert rank.locator(".cost").inner_text() == f"{one['cost']:.2f}"
            parts = _pieces(rank.locator(".stack").get_attribute("aria-label") or "")
            assert parts.pop("spared") == pytest.approx(one["credit"], abs=0.02)
            assert parts.keys() == {"prefill", "delay of others", "eviction", "decode"}
            assert sum(parts.values()) == pytest.approx(one["cost"], abs=0.02)
    assert page.find(f'[data-rank="{BIG}/0"]').get_attribute("data-chosen") == "true"
    assert "takes no new work" in page.text('[data-rank="3/0"]')
    # a new one appears by itself, and one is found by its id
    book(server, "later")
    page.page.wait_for_selector("[data-decision=later]")
    page.find("#decision-id").fill("load")
    page.page.keyboard.press("Enter")
    page.until("#decision-title", "load")
    page.find("#decision-id").fill("nobody")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("[data-empty=no-decision]")
    page.complaints = [one for one in page.complaints if "404" not in one]  # Chromium reports it


def _pieces(text: str) -> dict[str, float]:
    parts = (part.rpartition(" ") for part in text.split(", "))
    return {name: float(value) for name, _, value in parts}


def test_prefixes_are_found_by_tokens_and_by_decision(serve: Serve, tab: Tabs) -> None:
    server = serve()
    tokens = list(range(7000, 7096))
    page = tab(server)
    with FakeEngine(free_port()) as deep, FakeEngine(free_port()) as shallow:
        register(server, BIG, kv_events_endpoint=deep.endpoint)
        register(server, 2, kv_events_endpoint=shallow.endpoint)
        register(server, 3)
        publish(deep, 0, tokens[:64], 100, time.time())
        publish(shallow, 0, tokens[:16], 900, time.time())
        page.open("fleet")
        page.until(f'[data-key="{BIG}/0"]', "current")
        page.until('[data-key="2/0"]', "current")
        page.open("prefix")
        page.find("#prefix-tokens").fill(str(tokens))
        page.find("button:has-text('Look it up')").click()
        page.until("#prefix-held", "2 of 3 ranks")
        page.until("#prefix-result", "6, each of 16 tokens")
        page.until("#prefix-result", "blocks 0\u20135; at best")
        scores = call(server, "POST", "/overlap_scores", {"token_ids": tokens})["workers"]
        held = {f"{one['worker_id']} · {one['dp_rank']}": one["disk_blocks"] for one in scores}
        shown = {name: int(row["Held"].split(" ")[0]) for name, row in page.rows("holders").items()}
        assert shown == {name: blocks for name, blocks in held.items() if blocks}
        assert list(shown) == [f"{BIG} · 0", "2 · 0"], "the deepest first"
        assert page.rows("holders")[f"{BIG} · 0"]["Ranges"] == "device 0\u20133"
        page.page.set_viewport_size({"width": 390, "height": 800})
        assert page.flaws() == []
        body = {"reservation_id": "asked", "token_ids": tokens}
        call(server, "POST", "/select_and_reserve", body)
        page.open("prefix/asked")
        page.until("#prefix-held", "2 of 3 ranks")
        assert list(page.rows("holders")) == [f"{BIG} · 0", "2 · 0"]
        page.open("prefix")
        page.find("#prefix-tokens").fill(str(tokens))
        page.find("button:has-text('Look it up')").click()
        page.until("#prefix-held", "2 of 3 ranks")
        page.find("#prefix-tokens").fill("tokens: one, two")
        page.find("button:has-text('Look it up')").click()
        page.until(".prefix-form .problem", "letters")
        page.page.wait_for_selector("#prefix-result [data-empty=no-lookup]")
        assert page.find("#prefix-held").count() == 0, "of another prompt"
        page.find("#prefix-tokens").fill("1 2 3 4294967296")
        page.find("button:has-text('Look it up')").click()
        page.until(".prefix-form .problem", "4294967296")
        page.find("#prefix-tokens").fill("1 2 3")
        page.find("button:has-text('Look it up')").click()
        page.page.wait_for_selector("[data-empty=no-block]")


def test_admission_by_class_with_sheds(serve: Serve, tab: Tabs) -> None:
    server = serve(
        *("--admission-policy", "token-bucket", "--admission-control", "token-capacity"),
        *("--admission-config", '{"capacity": 200, "refill_rate": 0.001}'),
    )
    register(server, 1, max_num_batched_tokens=1000)
    page = tab(server)
    page.open("admission")
    for at, name in enumerate(("critical", "standard", "batch", "batch", "background")):
        body = {"token_ids": [at] * 90, "slo_class": name}
        assert server.request("POST", "/select", body).status in {200, 503}
    admission = call(server, "GET", "/admission")
    refused = sum(one["refused"] for one in admission["counters"].values())
    assert 0 < refused < 5
    page.page.wait_for_function(
        "refused => [...document.querySelectorAll('[data-table=classes] tbody tr')].reduce("
        "(sum, tr) => sum + parseInt(tr.cells[4].innerText), 0) === refused",
        arg=refused,
    )
    rows = page.rows("classes")
    for name, counts in admission["counters"].items():
        shown = [rows[name][head].split(" ")[0] for head in ("Offered", "Admitted", "Shed")]
        assert shown == [str(counts[key]) for key in ("offered", "admitted", "refused")], name
    sheds = page.rows("sheds")
    assert (
        sum(int(row["Times"]) for row in sheds.values() if row["Decision"] == "refuse") == refused
    )
    assert {row["Reason"] for row in sheds.values() if row["Decision"] == "refuse"} == {
        "insufficient-tokens"
    }
    assert page.find("[data-admission=on]").count() == 1
    # thresholds are changed through the API, after a question
    page.find("[data-table=thresholds] button:has-text('Change')").click()
    page.page.get_by_label("Prefill tokens").fill("500")
    page.page.get_by_role("button", name="Put in force").click()
    page.until("[data-table=thresholds]", "500")
    (threshold,) = call(server, "GET", "/busy_threshold")["thresholds"]
    assert threshold["active_prefill_tokens_threshold"] == 500
    page.until("#notice", "in force")


def test_leases_and_reservations(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, BIG)
    lease = {"lease_id": "proxy-1", "owner": "proxy", "ttl_s": 60}
    call(server, "POST", "/leases", lease)
    book(server, "one", 64, lease_id="proxy-1")
    book(server, "two", 32)
    page = tab(server)
    page.open("reservations")
    page.until("#reservations-total", "2 live reservations")
    rows = page.rows("reservations")
    assert list(rows) == ["two", "one"], "newest first"
    assert rows["one"]["Worker · rank"] == f"{BIG} · 0"
    assert (rows["one"]["Phase"], rows["one"]["Prompt / prefill, tokens"]) == ("prefill", "64 / 64")
    assert rows["one"]["Lives by"] == "lease proxy-1"
    assert page.rows("leases")["proxy-1"]["Reservations"] == "1"
    call(server, "POST", "/reservations/one/prefill_complete")
    page.until('[data-key="one"]', "decode")
    call(server, "DELETE", "/leases/proxy-1")
    page.page.wait_for_selector("[data-empty=no-leases]")
    page.until("#reservations-total", "1 live reservation")


def test_replicas_converge(serve: Serve, tab: Tabs) -> None:
    one_port, two_port = free_port(), free_port()
    one = serve("--replica-sync-port", str(one_port))
    register(one, 1)
    page = tab(one)
    page.open("replicas")
    page.page.wait_for_selector("[data-empty=no-peers]")
    two = serve(
        *("--replica-sync-port", str(two_port)),
        *("--replica-sync-peers", f"tcp://127.0.0.1:{one_port}"),
    )
    register(two, 1)
    peer = {"endpoint": f"tcp://127.0.0.1:{two_port}"}
    call(one, "POST", "/replica_sync/register_peer", peer)
    book(two, "theirs")
    page.until("#convergence", "converged: all 1 in sync")
    page.until("[data-table=publishers] tbody", "synced")
    (row,) = page.rows("publishers").values()
    assert row["Received from"] == peer["endpoint"]
    assert int(row["Router"]) > 2**32, "an id, to the last digit"
    owns = "document.querySelector('[data-table=publishers] tbody tr').cells[5].innerText"
    page.page.wait_for_function(f"() => {owns} === '1'")
    two.stop()
    text = "document.getElementById('convergence').innerText"
    page.page.wait_for_function(f"() => !{text}.includes('converged')")


def test_traffic_is_what_metrics_say(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, 1)
    page = tab(server)
    page.open("traffic")
    page.page.wait_for_selector("[data-empty=none-refused]")
    fresh = count(1)

    def select() -> None:
        call(server, "POST", "/select", {"token_ids": [next(fresh)] * 32})

    assert server.request("POST", "/select", {"token_ids": [1], "model_name": "x"}).status == 503
    page.until("[data-table=failed]", "no_schedulable_worker")
    assert page.rows("failed")["no_schedulable_worker"]["Requests"] == "1"
    drawn = """() => {
      const canvas = document.querySelector('[data-chart=rate] canvas');
      if (!canvas) return false;
      const paper = document.createElement('canvas').getContext('2d');
      paper.fillStyle = getComputedStyle(canvas).getPropertyValue('--a');
      paper.fillRect(0, 0, 1, 1);
      const [red, green, blue] = paper.getImageData(0, 0, 1, 1).data;
      const copy = document.createElement('canvas');  // to look at the chart's own slows it down
      copy.width = canvas.width;
      copy.height = canvas.height;
      const look = copy.getContext('2d', { willReadFrequently: true });
      look.drawImage(canvas, 0, 0);
      const { data } = look.getImageData(0, 0, canvas.width, canvas.height);
      for (let at = 0; at < data.length; at += 4) {
        const [r, g, b, opacity] = data.subarray(at, at + 4);
        if (opacity > 200 && Math.hypot(r - red, g - green, b - blue) < 24) return true;
      }
      return false;
    }"""  # the line of the answered ones, in its color
    page.until_while(select, drawn)
    page.until_while(
        select,
        """() => document.querySelector('[data-value=hitRate]').innerText === '0 %'
          && /s$/.test(document.querySelector('[data-value=p99]').innerText)""",
    )
    # a page opened now is not empty: the service remembers
    late = tab(server)
    late.open("traffic")
    late.page.wait_for_function(drawn)


EMPTY = {
    "fleet": ["no-workers"],
    "worker/9": ["no-worker"],
    "traffic": ["none-refused"],
    "admission": ["admission-off", "no-classes", "no-scopes", "no-sheds", "no-thresholds"],
    "decisions": ["no-decisions", "no-choice"],
    "prefix": ["no-prompt"],
    "reservations": ["no-leases", "no-reservations"],
    "replicas": ["replicas-off"],
    "doctor": ["none-lasting"],  # no worker, which is a finding after a minute
}


def test_every_view_says_that_it_is_empty(serve: Serve, tab: Tabs) -> None:
    page = tab(serve())
    for view, names in EMPTY.items():
        page.open(view)
        for name in names:
            page.page.wait_for_selector(f"[data-empty={name}]")
            assert len(page.text(f"[data-empty={name}]")) > 10
        assert page.flaws() == []
    assert "not ready" in page.text("[data-vital=ready]")


def test_a_ring_that_is_off_is_said_to_be(serve: Serve, tab: Tabs) -> None:
    page = tab(serve("--decision-ring", "0"))
    page.open("decisions")
    page.until("[data-empty=ring-off]", "--decision-ring")
    page.open("prefix")
    page.until("#prefix-recent", "--decision-ring")


def test_the_shadow_is_what_the_api_says(serve: Serve, tab: Tabs) -> None:
    server = serve()
    page = tab(server)
    page.open("shadow")
    page.page.wait_for_selector("[data-empty=no-shadow]")
    assert "--shadow-weights" in page.text("[data-empty=no-shadow]")
    settings = {"shadow_weights": {"overlap_score_credit": 0}, "shadow_sample": 1}
    call(server, "PUT", "/config", {"settings": settings})
    page.page.wait_for_selector("[data-empty=no-regret]")
    tokens = list(range(7000, 7064))
    with FakeEngine(free_port()) as engine:
        register(server, 1, kv_events_endpoint=engine.endpoint)
        register(server, 2)
        publish(engine, 0, tokens, 100, time.time())
        page.open("fleet")
        page.until('[data-key="1/0"]', "current")
        book(server, "load", 16, allowed_worker_ids=[1])
        for _ in range(3):
            call(server, "POST", "/select", {"token_ids": tokens})
        page.open("shadow")
        page.until("[data-card=agreement] .muted", "0 of 3")
        assert page.flaws() == []
        total = call(server, "GET", "/shadow")["total"]
        assert page.text("[data-card=agreement] b") == "0.0 %"
        for card, member in (
            ("live", "regret_by_live_weights"),
            ("shadow", "regret_by_shadow_weights"),
        ):
            assert page.text(f"[data-card=regret-{card}] b") == f"{total[member]['mean']:.2f}"
        gain = page.rows("shadow-gain")["Prompt tokens to prefill"]
        assert (gain["Live"], gain["Shadow"], gain["Gain"]) == ("0.0", "64.0", "-64.0")
        weights = page.rows("shadow-weights")["overlap_score_credit"]
        assert (weights["Live"], weights["Shadow"]) == ("1", "0")
        shown = [
            (number(row["By live weights"]), number(row["By the shadow's"]))
            for row in page.rows("shadow-regret").values()
        ]
        counts = (total[f"regret_by_{side}_weights"]["counts"] for side in ("live", "shadow"))
        assert shown == list(zip(*counts, strict=True))
        assert page.rows("shadow-skipped")["there was one candidate"]["Decisions"] == "1"
        assert page.rows("shadow-scopes")["default"]["Scored decisions"] == "3"
        about = page.find("[data-table=shadow-weights] code").first.get_attribute("title")
        assert about == weight_text("overlap_score_credit")
        page.page.set_viewport_size({"width": 420, "height": 800})
        assert page.overflow() == 0
        page.page.set_viewport_size({"width": 1280, "height": 800})
        call(server, "POST", "/select", {"token_ids": tokens, "selection_id": "now"})
        page.until_while(
            lambda: call(server, "POST", "/select", {"token_ids": tokens}),
            """() => ['[data-value=agreement]|0 %', '[data-value=shadow]|64'].every((pair) => {
              const [selector, text] = pair.split('|');
              return document.querySelector(selector).innerText.includes(text);
            })""",
        )
        assert not page.flaws()
        page.open("decisions/now")
        page.until("#shadow-verdict", "worker 2 · 0")
        assert not page.flaws()

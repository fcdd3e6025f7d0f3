// What the page knows: workers and ranks by id, the sections, and points of the last minutes.

const KEPT_MS = 15 * 60 * 1000;
const JUMP_MS = 60 * 1000;
const WINDOW_MS = 10 * 1000; // latency is of the requests of so long
const STEP_MS = 5000; // between two points of a chart, as the service keeps them; the newest is of now
const RATE_MIN_MS = 4000; // a rate is of no less: a second has too few requests to draw one
const SERVED_WINDOW_MS = 30 * 1000; // what a worker was chosen for is of so long: few are for each

// What was scored for a shadow between two points; where nothing was, nothing is known.
function shadowOf(now, then) {
  const scored = now.shadow_scored - then.shadow_scored;
  if (!(scored > 0)) return { agreement: null, livePrefill: null, shadowPrefill: null };
  const mean = (name) => (now[name] - then[name]) / scored;
  return { agreement: mean("shadow_agreed"), livePrefill: mean("shadow_live_prefill_tokens"), shadowPrefill: mean("shadow_own_prefill_tokens") };
}

const isOneStep = (a, b) => Math.floor(a / STEP_MS) === Math.floor(b / STEP_MS);
const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

export class Store {
  constructor() {
    this.about = null;
    this.atMs = 0;
    this.workers = new Map(); // by worker id
    this.ranks = new Map(); // by "worker/rank"
    this.points = []; // newest last; {life, at_ms, …, buckets}
    this.pasts = new Map(); // by "worker/rank": [at_ms, …totals], newest last
    this.admission = this.replicas = this.state = null;
    this.assets = null;
    this.receivedAt = 0;
  }

  // Takes in a message; returns which ranks and workers it has changed.
  take(kind, data) {
    if (kind === "snapshot") {
      this.about = data.about;
      this.assets ??= data.about.assets;
      this.workers.clear();
      this.ranks.clear();
      const first = data.history.length ? data.history[0][0] : data.at_ms;
      const life = data.about.life;
      this.points = this.points.filter((one) => one.life !== life || one.at_ms < first);
      if (life !== this.life) this.pasts.clear();
      this.life = life;
      for (const numbers of data.history) this.note(numbers);
      const known = new Set(this.pasts.keys()); // better than what the service has kept
      for (const [at, rows] of data.chosen) for (const [key, ...totals] of rows) if (!known.has(key)) this.notePast(key, [at, ...totals]);
    }
    this.atMs = data.at_ms;
    this.receivedAt = Date.now();
    for (const name of ["admission", "replicas", "state"]) if (name in data) this[name] = data[name];
    const dirty = new Set();
    for (const id of data.gone) this.forget(id);
    for (const worker of data.workers) {
      this.forgetRanks(worker.worker_id);
      this.workers.set(worker.worker_id, worker);
      dirty.add(worker.worker_id);
    }
    const fields = this.about.rank_fields;
    for (const row of data.ranks) {
      const rank = Object.fromEntries(fields.map((name, at) => [name, row[at]]));
      const key = `${rank.worker_id}/${rank.dp_rank}`;
      this.ranks.set(key, rank);
      this.notePast(key, [data.at_ms, rank.selections, rank.isl_tokens, rank.selected_prefill_tokens]);
      dirty.add(rank.worker_id);
    }
    this.note(data.point);
    return dirty;
  }

  forget(id) {
    for (const key of this.keysOf(id)) this.pasts.delete(key);
    this.forgetRanks(id);
    this.workers.delete(id);
  }

  keysOf(id) {
    const [start, size] = this.workers.get(id)?.ranks ?? [0, 0];
    return Array.from({ length: size }, (_, at) => `${id}/${start + at}`);
  }

  forgetRanks(id) {
    for (const key of this.keysOf(id)) this.ranks.delete(key);
  }

  note(numbers) {
    const names = this.about.point;
    const point = { life: this.about.life };
    names.forEach((name, at) => (point[name] = numbers[at]));
    point.buckets = numbers.slice(names.length);
    const last = this.points.at(-1);
    if (last && last.at_ms > point.at_ms + JUMP_MS) this.points = []; // somebody has set the clock back
    else if (last && last.life === point.life && last.at_ms >= point.at_ms) return;
    if (last && last.life === point.life && isOneStep(last.at_ms, point.at_ms)) this.points.pop();
    this.points.push(point);
    const oldest = point.at_ms - KEPT_MS;
    while (this.points[0].at_ms < oldest) this.points.shift();
  }

  // One row for every rank, and one for every worker that has none.
  rows() {
    const rows = [];
    for (const worker of this.workers.values()) {
      const [start, size] = worker.ranks;
      let seated = false;
      for (let n = 0; n < size; n += 1) {
        const rank = this.ranks.get(`${worker.worker_id}/${start + n}`);
        if (!rank) continue;
        seated = true;
        rows.push({ key: `${worker.worker_id}/${rank.dp_rank}`, worker, rank });
      }
      if (!seated) rows.push({ key: worker.worker_id, worker, rank: null });
    }
    return rows;
  }

  // Rates between points: [{at_ms, selections, failed, hitRate, p50, p99, waiting, reservations,
  // agreement, livePrefill, shadowPrefill}]
  series() {
    const out = [];
    let back = 0; // of what is over ten seconds
    let near = 0; // of rates
    for (let i = 1; i < this.points.length; i += 1) {
      const now = this.points[i];
      const before = this.points[i - 1];
      if (now.life !== before.life) {
        out.push({ at_ms: now.at_ms, isBreak: true });
        back = near = i;
        continue;
      }
      while (near < i - 1 && this.points[near + 1].at_ms <= now.at_ms - RATE_MIN_MS) near += 1;
      const seconds = (now.at_ms - this.points[near].at_ms) / 1000;
      if (seconds <= 0) continue;
      while (back < i - 1 && this.points[back + 1].at_ms <= now.at_ms - WINDOW_MS) back += 1;
      const then = this.points[back].life === now.life ? this.points[back] : before;
      const isl = now.isl_tokens - then.isl_tokens;
      const counts = now.buckets.map((number, at) => number - then.buckets[at]);
      const asked = total(counts);
      out.push({
        at_ms: now.at_ms,
        selections: (now.selections - this.points[near].selections) / seconds,
        failed: (now.failed - this.points[near].failed) / seconds,
        hitRate: isl > 0 ? 1 - (now.prefill_tokens - then.prefill_tokens) / isl : null,
        p50: asked ? this.quantile(counts, asked, 0.5) : null,
        p99: asked ? this.quantile(counts, asked, 0.99) : null,
        waiting: now.waiting,
        reservations: now.reservations,
        ...shadowOf(now, then),
      });
    }
    return out;
  }

  // Totals that only grow; the first stays, as what all others are counted from.
  notePast(key, point) {
    const past = this.pasts.get(key);
    const last = past?.at(-1);
    if (!last || last[0] > point[0] + JUMP_MS || last[1] > point[1]) {
      this.pasts.set(key, [point]); // new to us, or it came anew
      return;
    }
    if (last[1] === point[1]) return;
    if (past.length > 1 && isOneStep(last[0], point[0])) past.pop();
    past.push(point);
    while (past.length > 2 && past[1][0] < point[0] - KEPT_MS) past.shift();
  }

  // What ranks were chosen for until a moment, over so long: {at_ms, selections (a second), hitRate}.
  chosenFor(pasts, atMs, overMs) {
    const from = Math.max(atMs - overMs, Math.min(...pasts.map((past) => past[0][0])));
    const seconds = (atMs - from) / 1000;
    if (!(seconds >= 1)) return null;
    const until = (past, ms) => past.findLast((point) => point[0] <= ms) ?? past[0];
    const sums = [0, 0, 0];
    for (const past of pasts) {
      const [now, then] = [until(past, atMs), until(past, from)];
      for (let at = 0; at < sums.length; at += 1) sums[at] += now[at + 1] - then[at + 1];
    }
    const [selections, isl, prefill] = sums;
    return { at_ms: atMs, selections: selections / seconds, hitRate: isl > 0 ? 1 - prefill / isl : null };
  }

  servedBy(key, overMs) {
    const past = this.pasts.get(key);
    return past ? this.chosenFor([past], this.atMs, overMs) : null;
  }

  // A worker's rates of the last minutes, every few seconds, and now.
  served(id) {
    const pasts = this.keysOf(id).map((key) => this.pasts.get(key)).filter(Boolean);
    if (!pasts.length) return [];
    const first = Math.max(this.atMs - KEPT_MS, Math.min(...pasts.map((past) => past[0][0])));
    const out = [];
    for (let at = Math.ceil(first / STEP_MS) * STEP_MS; at < this.atMs; at += STEP_MS) out.push(this.chosenFor(pasts, at, SERVED_WINDOW_MS));
    out.push(this.chosenFor(pasts, this.atMs, SERVED_WINDOW_MS));
    return out.filter(Boolean);
  }

  quantile(counts, asked, share) {
    const bounds = this.about.latency_bounds_s;
    let left = asked * share;
    for (let at = 0; at < counts.length; at += 1) {
      if (counts[at] >= left && counts[at] > 0) {
        const low = at ? bounds[at - 1] : 0;
        const high = bounds[at] ?? bounds.at(-1);
        return low + ((high - low) * left) / counts[at];
      }
      left -= counts[at];
    }
    return bounds.at(-1);
  }
}

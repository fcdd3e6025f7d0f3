// What the page knows: workers and ranks by id, the sections, and points of the last minutes.

const KEPT_MS = 15 * 60 * 1000;
const JUMP_MS = 60 * 1000;
const WINDOW_MS = 10 * 1000; // latency is of the requests of so long

// What was scored for a shadow between two points; where nothing was, nothing is known.
function shadowOf(now, then) {
  const scored = now.shadow_scored - then.shadow_scored;
  if (!(scored > 0)) return { agreement: null, livePrefill: null, shadowPrefill: null };
  const mean = (name) => (now[name] - then[name]) / scored;
  return { agreement: mean("shadow_agreed"), livePrefill: mean("shadow_live_prefill_tokens"), shadowPrefill: mean("shadow_own_prefill_tokens") };
}

const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

export class Store {
  constructor() {
    this.about = null;
    this.atMs = 0;
    this.workers = new Map(); // by worker id
    this.ranks = new Map(); // by "worker/rank"
    this.points = []; // newest last; {life, at_ms, …, buckets}
    this.admission = this.replicas = this.state = null;
    this.assets = null;
    this.heardAt = 0;
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
      for (const numbers of data.history) this.note(numbers);
    }
    this.atMs = data.at_ms;
    this.heardAt = Date.now();
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
      this.ranks.set(`${rank.worker_id}/${rank.dp_rank}`, rank);
      dirty.add(rank.worker_id);
    }
    this.note(data.point);
    return dirty;
  }

  forget(id) {
    this.workers.delete(id);
    this.forgetRanks(id);
  }

  forgetRanks(id) {
    const worker = this.workers.get(id);
    const ranks = worker ? worker.ranks[1] : 0;
    for (let n = 0; n < ranks; n += 1) this.ranks.delete(`${id}/${worker.ranks[0] + n}`);
  }

  note(numbers) {
    const names = this.about.point;
    const point = { life: this.about.life };
    names.forEach((name, at) => (point[name] = numbers[at]));
    point.buckets = numbers.slice(names.length);
    const last = this.points.at(-1);
    if (last && last.at_ms > point.at_ms + JUMP_MS) this.points = []; // somebody has set the clock back
    else if (last && last.life === point.life && last.at_ms >= point.at_ms) return;
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
    let back = 0;
    for (let i = 1; i < this.points.length; i += 1) {
      const now = this.points[i];
      const before = this.points[i - 1];
      if (now.life !== before.life) {
        out.push({ at_ms: now.at_ms, isBreak: true });
        back = i;
        continue;
      }
      const seconds = (now.at_ms - before.at_ms) / 1000;
      if (seconds <= 0) continue;
      while (back < i - 1 && this.points[back + 1].at_ms <= now.at_ms - WINDOW_MS) back += 1;
      const then = this.points[back].life === now.life ? this.points[back] : before;
      const isl = now.isl_tokens - then.isl_tokens;
      const counts = now.buckets.map((number, at) => number - then.buckets[at]);
      const asked = total(counts);
      out.push({
        at_ms: now.at_ms,
        selections: (now.selections - before.selections) / seconds,
        failed: (now.failed - before.failed) / seconds,
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

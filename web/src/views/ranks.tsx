/** Who is waited for: trainers by steps, as dark as each is later than the others, coloured by where it is late. */
import type { TargetedKeyboardEvent } from "preact";
import { useState } from "preact/hooks";
import { integer, millis, percent } from "../format";
import { jobHref, navigate } from "../router";
import { splitName } from "../store/curves";
import { newestOf } from "../store/exchange";
import type { JobStore } from "../store/job";
import { type At, moved, NOTICED, type RankCell, type RankMap, rankMap, type Track } from "../store/ranks";
import { Stacks } from "./stacks";

/** Shares of a turn at which a cell is darker. */
const LEVELS = [0.05, NOTICED, 0.25, 0.5] as const;
const MOST_RANKS = 64;
const WHERE = { inside: "in its operators", between: "between its steps" } as const;

function mapOf(store: JobStore): RankMap | null {
  store.metricsVersion.value;
  const job = store.job.value;
  if (job === null) return null;
  const tracks = new Map<number, Track>();
  for (const one of newestOf(job.replicas).filter((replica) => replica.role === "trainer")) {
    const name = (base: string) => (one.index === 0 ? base : `${base}.trainer${one.index}`);
    const stepMs = store.series.byName.get(name("step_ms"));
    if (stepMs === undefined || splitName(name("step_ms")).base !== "step_ms") continue;
    const syncMs = store.series.byName.get(name("sync_ms"));
    tracks.set(one.index, { stepMs, syncMs, waits: store.exchange.waits(one.stream) });
  }
  return rankMap(tracks);
}

export function Ranks({ store }: { store: JobStore }) {
  const map = mapOf(store);
  const [at, setAt] = useState<At | null>(null);
  if (map === null) return null;
  const shown = map.ranks.slice(0, MOST_RANKS);
  const first = map.bins[0]?.from ?? 0;
  const last = map.bins[map.bins.length - 1]?.to ?? 0;
  return (
    <section class="ranks" aria-labelledby="ranks-title" data-testid="ranks">
      <h3 class="part-title" id="ranks-title">
        Who is waited for · steps {integer(first)} – {integer(last)}
      </h3>
      <p class="muted ranks-says" data-testid="ranks-says">
        {at === null ? summary(map) : cellWords(map, at)}
      </p>
      <div class="ranks-grid" onPointerLeave={() => setAt(null)} onFocusOut={() => setAt(null)}>
        {shown.map((rank, index) => (
          <Row
            key={rank}
            map={map}
            index={index}
            at={at}
            rows={shown.length}
            point={setAt}
            open={(bin) => openStep(store, map, bin)}
          />
        ))}
      </div>
      <p class="ranks-legend">
        <i class="heat-inside heat-4" /> late in its operators <i class="heat-between heat-4" /> late between its steps
        (its reader) · the darker, the later: {LEVELS.map((level) => percent(level)).join(", ")} of a step
        {map.ranks.length > shown.length &&
          ` · ${integer(map.ranks.length - shown.length)} more trainers are not drawn`}
      </p>
      {store.job.value !== null && <Stacks job={store.job.value} />}
    </section>
  );
}

interface RowProps {
  readonly map: RankMap;
  readonly index: number;
  /** The cell under the pointer, or that the keyboard is at. */
  readonly at: At | null;
  readonly rows: number;
  readonly point: (at: At) => void;
  readonly open: (bin: number) => void;
}

function Row({ map, index, at, rows, point, open }: RowProps) {
  const rank = map.ranks[index] ?? 0;
  const cells = map.cells[index] ?? [];
  const total = map.totals[index] ?? null;
  const isAt = at?.rank === index;
  // The newest steps first, as a slider begins at its value.
  const bin = isAt ? at.bin : map.bins.length - 1;
  const binAt = (event: MouseEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const under = Math.floor(((event.clientX - box.left) / Math.max(1, box.width)) * cells.length);
    return Math.max(0, Math.min(cells.length - 1, under));
  };
  const late = total !== null && total.lateMs >= NOTICED * map.turnMs;
  return (
    <>
      <span class={late ? "rank late" : "rank"}>trainer {rank}</span>
      <div
        class="rank-cells"
        role="slider"
        tabIndex={(at?.rank ?? 0) === index ? 0 : -1}
        aria-label={`trainer ${rank}: ${totalWords(total, map.turnMs)}`}
        aria-valuemin={1}
        aria-valuemax={map.bins.length}
        aria-valuenow={bin + 1}
        aria-valuetext={cellWords(map, { rank: index, bin })}
        data-testid={`rank-${rank}`}
        onFocus={() => point({ rank: index, bin: at?.bin ?? bin })}
        onKeyDown={(event) => onKey(event, { rank: index, bin }, { rows, bins: map.bins.length, point, open })}
        onPointerMove={(event) => point({ rank: index, bin: binAt(event) })}
        onClick={(event) => open(binAt(event))}
      >
        <Cells map={map} cells={cells} at={isAt ? bin : null} />
      </div>
      <span class={late ? "rank-total late" : "rank-total"}>{totalWords(total, map.turnMs)}</span>
    </>
  );
}

function Cells({ map, cells, at }: { map: RankMap; cells: readonly (RankCell | null)[]; at: number | null }) {
  return (
    <svg viewBox={`0 0 ${Math.max(1, cells.length)} 1`} preserveAspectRatio="none" aria-hidden="true">
      {(["inside", "between"] as const).flatMap((cause) =>
        LEVELS.map((_, level) => (
          <path
            key={`${cause}${level}`}
            class={`heat-${cause} heat-${level + 1}`}
            d={pathOf(cells, cause, level + 1, map)}
          />
        )),
      )}
      {at !== null && <rect class="rank-at" x={at} y={0} width={1} height={1} />}
    </svg>
  );
}

interface Keys {
  readonly rows: number;
  readonly bins: number;
  readonly point: (at: At) => void;
  readonly open: (bin: number) => void;
}

/** Arrows, Home and End go from cell to cell; Enter opens its step. */
function onKey(event: TargetedKeyboardEvent<HTMLElement>, at: At, { rows, bins, point, open }: Keys): void {
  const to = moved(at, event.key, rows, bins);
  if (to === null && event.key !== "Enter") return;
  event.preventDefault();
  if (to === null) {
    open(at.bin);
    return;
  }
  point(to);
  if (to.rank === at.rank) return;
  const cells = event.currentTarget.parentElement?.querySelectorAll<HTMLElement>("[role=slider]");
  cells?.[to.rank]?.focus();
}

function pathOf(cells: readonly (RankCell | null)[], cause: RankCell["cause"], level: number, map: RankMap): string {
  return cells
    .map((cell, bin) =>
      cell !== null && cell.cause === cause && levelOf(cell, map) === level ? `M${bin + 0.06} 0h0.88v1h-0.88z` : "",
    )
    .join("");
}

const levelOf = (cell: RankCell, map: RankMap): number =>
  LEVELS.filter((level) => map.turnMs > 0 && cell.lateMs >= level * map.turnMs).length;

const ms = (value: number): string => millis(value * 1e6);

function totalWords(total: RankCell | null, turnMs: number): string {
  if (total === null) return "no step reported";
  const own = `own ${ms(total.insideMs + total.betweenMs)}, waits ${ms(total.waitMs)}`;
  return total.lateMs >= NOTICED * turnMs ? `${ms(total.lateMs)} later ${WHERE[total.cause]} · ${own}` : own;
}

function summary(map: RankMap): string {
  const late = map.totals.reduce(
    (most, one, index) => ((one?.lateMs ?? 0) > (map.totals[most]?.lateMs ?? 0) ? index : most),
    0,
  );
  const total = map.totals[late] ?? null;
  if (total === null || total.lateMs < NOTICED * map.turnMs) {
    return `No trainer: their own times differ by less than ${percent(NOTICED)} of a step of ${ms(map.turnMs)}.`;
  }
  return `Trainer ${map.ranks[late]} arrives ${ms(total.lateMs)} later than the others, ${WHERE[total.cause]}; a step takes ${ms(map.turnMs)}.`;
}

function cellWords(map: RankMap, { rank, bin }: At): string {
  const [cell, steps] = [map.cells[rank]?.[bin] ?? null, map.bins[bin]];
  if (steps === undefined) return summary(map);
  const which =
    steps.from === steps.to ? `step ${integer(steps.to)}` : `steps ${integer(steps.from)} – ${integer(steps.to)}`;
  const who = `trainer ${map.ranks[rank]}, ${which}`;
  if (cell === null) return `${who}: none was reported`;
  return `${who}: ${ms(cell.lateMs)} later; operators ${ms(cell.insideMs)}, between steps ${ms(cell.betweenMs)}, waits ${ms(cell.waitMs)}`;
}

/** The sampled step nearest to a bin, on the timeline. */
function openStep(store: JobStore, map: RankMap, bin: number): void {
  const to = map.bins[bin]?.to ?? 0;
  const nearest = store.history
    .all()
    .reduce<number | null>(
      (best, one) => (best === null || Math.abs(one.step - to) < Math.abs(best - to) ? one.step : best),
      null,
    );
  if (nearest !== null) navigate(`${jobHref(store.jobId, "timeline")}&step=${nearest}`);
}

/** Trainers and parameter servers: bytes of each pair, waits, staleness of gradients; and each block. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { bytes, compact, integer, millis, plural } from "../format";
import { Empty, Head, Link } from "../parts/basics";
import { useHeldOrder } from "../parts/held";
import { jobHref, setQuery, url } from "../router";
import { type Amounts, type BlockRow, type Cell, cellKey, type ExchangeView } from "../store/exchange";
import { isTerminal, type JobStore } from "../store/job";

const METRICS = ["bytes", "wait", "staleness"] as const;
type Metric = (typeof METRICS)[number];
/** A block without a name. */
const JOINT = "(barriers, joint calls)";
const MAX_BLOCKS = 400;
const WORST = 4;
const MAX_SUMMARY = 8;

const VALUE: Readonly<Record<Metric, (of: Amounts) => number>> = {
  bytes: (of) => of.bytesPerS,
  wait: (of) => of.waitNs,
  staleness: (of) => of.staleness,
};
const TITLE: Readonly<Record<Metric, string>> = { bytes: "Bytes/s", wait: "Wait", staleness: "Staleness" };

function text(metric: Metric, value: number): string {
  if (metric === "bytes") return `${bytes(value)}/s`;
  if (metric === "wait") return millis(value);
  return value === 0 ? "0" : compact(value);
}

export function exchangeOf(store: JobStore): ExchangeView | null {
  store.syncVersion.value;
  const job = store.job.value;
  return job === null ? null : store.exchange.view(job, isTerminal(job), performance.now());
}

export const hasPservers = (store: JobStore): boolean =>
  store.job.value?.spec.mode === "pserver" ||
  (store.job.value?.replicas.some((one) => one.role === "pserver") ?? false);

function chosenMetric(): Metric {
  const wanted = url.value.searchParams.get("metric");
  return METRICS.find((one) => one === wanted) ?? "bytes";
}

/** The matrix and, below it, sparse tables and the blocks with their servers. */
export function ExchangePart({ view, tables }: { view: ExchangeView | null; tables: ComponentChildren }) {
  if (view === null || view.pservers.length === 0) {
    return (
      <Empty title="Nothing has been exchanged yet">
        <span>Trainers report here what they send to each parameter server, and how long they wait for it.</span>
      </Empty>
    );
  }
  return (
    <>
      <Matrix view={view} metric={chosenMetric()} />
      {tables}
      <BlockTable view={view} metric={chosenMetric()} />
    </>
  );
}

export function describeExchange(view: ExchangeView): string {
  const moved = [...view.cells.values()].reduce((sum, cell) => sum + cell.bytesPerS, 0);
  return [
    `${plural(view.trainers.length, "trainer")} × ${plural(view.pservers.length, "pserver")}`,
    `${bytes(moved)}/s`,
    ...longestWait(view),
    view.whole ? "mean of the whole run" : "mean of the last 10 s",
  ].join(" · ");
}

/** The trainer that waits longest, beside its whole step. In sync training the one that waits least is the straggler. */
function longestWait(view: ExchangeView): string[] {
  const [worst] = [...view.times].sort(([, a], [, b]) => b.waitNs - a.waitNs);
  if (worst === undefined || worst[1].waitNs === 0) return [];
  const [trainer, { waitNs, stepNs }] = worst;
  const unit = stepNs === null ? " an exchange" : ` of ${millis(stepNs)} a step`;
  return [`trainer-${trainer} waits${view.trainers.length > 1 ? " longest" : ""}: ${millis(waitNs)}${unit}`];
}

/** For the header of a job: the longest wait of a trainer in a step; null where it is unknown. */
export function longestWaitNs(view: ExchangeView | null): number | null {
  const times = view === null ? [] : [...view.times.values()];
  if (times.length === 0 || times.some((one) => one.stepNs === null)) return null;
  return Math.max(...times.map((one) => one.waitNs));
}

/** For the side panel: what each server moves, and how long the slowest trainer waits for it. */
export function PserverSummary({ store }: { store: JobStore }) {
  const view = hasPservers(store) ? exchangeOf(store) : null;
  const job = store.job.value;
  if (view === null || job === null || view.pservers.length === 0) return null;
  const cells = [...view.cells.values()];
  return (
    <div data-testid="pserver-summary">
      <h2>
        <span>{view.whole ? "Parameter servers" : "Parameter servers, last 10 s"}</span>
        <Link href={jobHref(job.id, "sync")} class="faint">
          matrix
        </Link>
      </h2>
      <table>
        <tbody>
          {view.pservers.slice(0, MAX_SUMMARY).map(({ index }) => {
            const mine = cells.filter((one) => one.pserver === index);
            return (
              <tr key={index}>
                <td class="mono">pserver-{index}</td>
                <td class="num">{bytes(mine.reduce((sum, one) => sum + one.bytesPerS, 0))}/s</td>
                <td class="num" title="of the trainer that waits longest">
                  {text("wait", Math.max(0, ...mine.map(VALUE.wait)))} wait
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Matrix({ view, metric }: { view: ExchangeView; metric: Metric }) {
  const [shown, setShown] = useState<string | null>(null);
  const most = Math.max(...[...view.cells.values()].map(VALUE[metric]), 0);
  const cell = (shown === null ? undefined : view.cells.get(shown)) ?? largest(view, metric);
  return (
    <div class="exchange">
      <div class="exchange-head">
        <fieldset class="switch">
          <legend class="sr">What the cells show</legend>
          {METRICS.map((one) => (
            <button
              key={one}
              type="button"
              class="btn small"
              aria-pressed={one === metric}
              onClick={() => setQuery({ metric: one === "bytes" ? null : one })}
            >
              {TITLE[one]}
            </button>
          ))}
        </fieldset>
        <Scale metric={metric} most={most} perStep={view.perStep} />
      </div>
      <div class="matrix-box">
        <table class={`matrix heat-${metric}`} data-testid="exchange-matrix" data-metric={metric}>
          <thead>
            <tr>
              <th scope="col">
                <span class="sr">trainer</span>
              </th>
              {view.pservers.map((one) => (
                <th key={one.index} scope="col" title={one.endpoint}>
                  pserver-{one.index}
                  <small>{one.endpoint}</small>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {view.trainers.map((trainer) => (
              <tr key={trainer}>
                <th scope="row">
                  trainer-{trainer}
                  <StepTime ns={view.times.get(trainer)?.stepNs ?? null} />
                </th>
                {view.pservers.map(({ index }) => (
                  <HeatCell
                    key={index}
                    name={cellKey(trainer, index)}
                    cell={view.cells.get(cellKey(trainer, index))}
                    metric={metric}
                    most={most}
                    chosen={cell !== undefined && cellKey(trainer, index) === cellKey(cell.trainer, cell.pserver)}
                    onShow={setShown}
                  />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {cell !== undefined && <CellFacts cell={cell} metric={metric} />}
      </div>
    </div>
  );
}

function StepTime({ ns }: { ns: number | null }) {
  return ns === null ? null : <small>{millis(ns)} a step</small>;
}

/** Shown while the pointer is on no other. */
function largest(view: ExchangeView, metric: Metric): Cell | undefined {
  return [...view.cells.values()].sort((a, b) => VALUE[metric](b) - VALUE[metric](a))[0];
}

function HeatCell(props: {
  name: string;
  cell: Cell | undefined;
  metric: Metric;
  most: number;
  chosen: boolean;
  onShow: (name: string) => void;
}) {
  const { name, cell, metric, most, chosen, onShow } = props;
  if (cell === undefined) return <td class="nothing">–</td>;
  const value = VALUE[metric](cell);
  return (
    <td>
      <button
        type="button"
        class="heat"
        style={{ "--heat": `${most > 0 ? Math.round((value / most) * 50) : 0}%` }}
        data-testid="exchange-cell"
        data-cell={name}
        aria-pressed={chosen}
        onMouseEnter={() => onShow(name)}
        onFocus={() => onShow(name)}
        onClick={() => onShow(name)}
      >
        {text(metric, value)}
        {cell.retries > 0 && <small>{plural(cell.retries, "retry", "retries")}</small>}
      </button>
    </td>
  );
}

function Scale({ metric, most, perStep }: { metric: Metric; most: number; perStep: boolean }) {
  const words = {
    bytes: "sent and received",
    wait: perStep ? "a step" : "an exchange",
    staleness: "",
  };
  const said = metric === "staleness" ? "updates by others that a gradient did not know of, mean" : words[metric];
  if (most === 0) {
    return (
      <div class="scale">
        <span class="mono">all 0</span>
        <span class="faint">{said}</span>
      </div>
    );
  }
  return (
    <div class={`scale heat-${metric}`}>
      <span>0</span>
      <i aria-hidden="true" />
      <span class="mono">{text(metric, most)}</span>
      <span class="faint">{said}</span>
    </div>
  );
}

function CellFacts({ cell, metric }: { cell: Cell; metric: Metric }) {
  const worst = [...cell.blocks]
    .filter((one) => VALUE[metric](one) > 0)
    .sort((a, b) => VALUE[metric](b) - VALUE[metric](a))
    .slice(0, WORST);
  return (
    <aside class="cell-facts" data-testid="exchange-facts" aria-live="off">
      <h3>
        trainer-{cell.trainer} × pserver-{cell.pserver}
      </h3>
      <dl>
        <dt>sends</dt>
        <dd>{bytes(cell.sentPerS)}/s</dd>
        <dt>receives</dt>
        <dd>{bytes(cell.receivedPerS)}/s</dd>
        <dt>waits</dt>
        <dd>{text("wait", cell.waitNs)}</dd>
        <dt>staleness</dt>
        <dd>{text("staleness", cell.staleness)}</dd>
        <dt>calls</dt>
        <dd>
          {integer(cell.calls)} · {plural(cell.retries, "retry", "retries")}
        </dd>
        <dt>merged</dt>
        <dd>
          {integer(cell.merges)} before sending · {integer(cell.joined)} on the server
        </dd>
      </dl>
      {worst.length > 0 && (
        <table>
          <caption>Most {TITLE[metric].toLowerCase()}</caption>
          <tbody>
            {worst.map((one) => (
              <tr key={one.block}>
                <td class="mono clip" title={one.block}>
                  {one.block || JOINT}
                </td>
                <td class="num">{text(metric, VALUE[metric](one))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </aside>
  );
}

/** Sorted by what the matrix shows, so that what makes a cell large stands on top. */
function BlockTable({ view, metric }: { view: ExchangeView; metric: Metric }) {
  const value = VALUE[metric];
  const rows = useHeldOrder(
    metric,
    view.blocks,
    (row) => `${row.pserver},${row.block}`,
    (a, b) => value(b) - value(a) || b.bytesPerS - a.bytesPerS || (a.block < b.block ? -1 : 1),
  );
  const most = { bytes: Math.max(1, ...rows.map(VALUE.bytes)), wait: Math.max(1, ...rows.map(VALUE.wait)) };
  return (
    <div>
      <h3 class="part-title">
        Parameter blocks <em>{rows.length > MAX_BLOCKS ? `${MAX_BLOCKS} of ${integer(rows.length)}` : rows.length}</em>
      </h3>
      <table data-testid="block-table">
        <Head
          columns={[
            "Block",
            "Server",
            ["Bytes/s", "num"],
            { bar: "bytes, as a bar", class: "narrow-hide" },
            [view.perStep ? "Wait / step" : "Wait / exchange", "num"],
            { bar: "wait, as a bar", class: "narrow-hide" },
            ["Staleness", "num"],
            ["Merged", "num narrow-hide"],
            ["Calls", "num narrow-hide"],
          ]}
        />
        <tbody>
          {rows.slice(0, MAX_BLOCKS).map((row) => (
            <BlockLine key={`${row.pserver},${row.block}`} row={row} most={most} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function BlockLine(props: { row: BlockRow; most: { bytes: number; wait: number } }) {
  const { row, most } = props;
  return (
    <tr data-testid="block-row" data-block={row.block} data-pserver={row.pserver}>
      <td class="mono block-name">{row.block || JOINT}</td>
      <td class="server-name">{row.pserver < 0 ? "in the trainer" : `pserver-${row.pserver}`}</td>
      <td class="num">{text("bytes", row.bytesPerS)}</td>
      <td class="meter-cell narrow-hide">
        <i class="meter c-forward" style={{ width: `${(row.bytesPerS / most.bytes) * 100}%` }} />
      </td>
      <td class="num">{text("wait", row.waitNs)}</td>
      <td class="meter-cell narrow-hide">
        <i class="meter" style={{ width: `${(row.waitNs / most.wait) * 100}%` }} />
      </td>
      <td class="num">{text("staleness", row.staleness)}</td>
      <td class="num narrow-hide">{integer(row.merges + row.joined)}</td>
      <td class="num narrow-hide">{integer(row.calls)}</td>
    </tr>
  );
}

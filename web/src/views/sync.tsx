/** Gradient exchange per parameter, live: its owner, how large, how long, and the longest wait. */

import { bytes, integer, millis, plural } from "../format";
import { Empty, Head } from "../parts/basics";
import { useHeldOrder } from "../parts/held";
import type { JobStore } from "../store/job";
import type { SyncRow } from "../store/sync";
import { describeExchange, ExchangePart, exchangeOf, hasPservers } from "./exchange";
import { Ranks } from "./ranks";
import { Tables } from "./tables";

export function shownSyncRows(store: JobStore): SyncRow[] {
  store.syncVersion.value;
  const hash = store.shownHash.value;
  const document = store.shownDocument.value;
  return hash === null || document === null ? [] : store.sync.rows(document, hash);
}

export function SyncView({ store }: { store: JobStore }) {
  return hasPservers(store) ? <WithPservers store={store} /> : <Local store={store} />;
}

function WithPservers({ store }: { store: JobStore }) {
  const view = exchangeOf(store);
  const rows = useByWait(shownSyncRows(store));
  return (
    <section class="panel" aria-labelledby="sync-title">
      <div class="panel-title">
        <h2 id="sync-title">Exchange with parameter servers</h2>
        {view !== null && <em>{describeExchange(view)}</em>}
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Matrix and blocks">
        <Ranks store={store} />
        <ExchangePart view={view} tables={<Tables store={store} />} />
        {rows.length > 0 && (
          <>
            <h3 class="part-title">Between the replicas of one trainer</h3>
            <SyncTable rows={rows} />
          </>
        )}
      </div>
    </section>
  );
}

const longest = (a: SyncRow, b: SyncRow): number => b.waitNs - a.waitNs || b.timeNs - a.timeNs || a.index - b.index;

/** Rows by wait, in an order that is held for some seconds. */
export function useByWait(rows: readonly SyncRow[]): SyncRow[] {
  return useHeldOrder("wait", rows, (row) => row.index, longest);
}

function Local({ store }: { store: JobStore }) {
  const rows = useByWait(shownSyncRows(store));
  const wait = rows.reduce((most, row) => Math.max(most, row.waitNs), 0);
  return (
    <section class="panel" aria-labelledby="sync-title">
      <div class="panel-title">
        <h2 id="sync-title">Gradient sync</h2>
        {rows.length > 0 && (
          <em>
            {plural(rows.length, "parameter")} · {totalBytes(rows)} per step · longest wait {millis(wait)} · mean of the
            last 10 s
          </em>
        )}
      </div>
      {rows.length === 0 ? (
        <Empty title="No gradients are exchanged">
          <span>{whyNone(store)}</span>
        </Empty>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Parameters">
          <Ranks store={store} />
          <SyncTable rows={rows} />
        </div>
      )}
    </section>
  );
}

/** Trainers of a collective job that exchange nothing each train a model of their own, which is a mistake. */
function whyNone(store: JobStore): string {
  const spec = store.job.value?.spec;
  const trainers = spec?.trainers?.count ?? 1;
  if (spec?.mode === "collective" && trainers > 1 && store.shownHash.value !== null) {
    return `Unless local_sgd averages their parameters, each of the ${trainers} trainers trains for itself: transpile the program with mode="collective", or give the ParallelExecutor num_trainers and trainer_id.`;
  }
  return "A graph of one replica has nothing to exchange; with more, its parameters appear here.";
}

/** Sparse rows vary in number; before a trainer has counted their bytes, none are invented. */
const unknown = (row: SyncRow): boolean => row.sparse && row.bytes === 0;
export const syncBytes = (row: SyncRow): string => (unknown(row) ? "varies" : bytes(row.bytes));

/** What all parameters move together; says so where it lacks the bytes of some. */
export function totalBytes(rows: readonly SyncRow[]): string {
  const sum = bytes(rows.reduce((total, row) => total + row.bytes, 0));
  const without = rows.filter(unknown).length;
  return without === 0 ? sum : `${sum} and ${plural(without, "sparse parameter")}`;
}

function SyncTable({ rows }: { rows: readonly SyncRow[] }) {
  const mostWait = Math.max(1, ...rows.map((row) => row.waitNs));
  const mostTime = Math.max(1, ...rows.map((row) => row.timeNs));
  return (
    <table data-testid="sync-table">
      <Head
        columns={[
          "Parameter",
          ["Wait / step ▾", "num"],
          { bar: "wait, as a bar", class: "tiny-hide" },
          ["Time / step", "num"],
          { bar: "time, as a bar", class: "tiny-hide" },
          ["Bytes", "num tiny-hide"],
          ["Mode", "tiny-hide"],
          ["Owner", "tiny-hide"],
          ["Exchanges", "num tiny-hide"],
        ]}
      />
      <tbody>
        {rows.map((row) => (
          <tr key={row.index} data-testid="sync-row" data-parameter={row.parameter}>
            <td class="mono">
              {row.parameter}
              {row.sparse && <span class="tag">sparse rows</span>}
            </td>
            <td class="num">{millis(row.waitNs)}</td>
            <td class="meter-cell tiny-hide">
              <i class="meter" style={{ width: `${(row.waitNs / mostWait) * 100}%` }} />
            </td>
            <td class="num">{millis(row.timeNs)}</td>
            <td class="meter-cell tiny-hide">
              <i class="meter c-forward" style={{ width: `${(row.timeNs / mostTime) * 100}%` }} />
            </td>
            <td class="num tiny-hide">{syncBytes(row)}</td>
            <td class="tiny-hide">{row.mode.replace("_", "-")}</td>
            <td class="tiny-hide">{row.owner < 0 ? "every replica" : `replica ${row.owner}`}</td>
            <td class="num tiny-hide" data-testid="sync-count">
              {integer(row.count)}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

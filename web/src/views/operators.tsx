/** The graph as a table: every operator with its numbers. What the canvas shows, for eyes and ears that want text. */
import { useRef } from "preact/hooks";
import { integer, nanos, percent } from "../format";
import type { GraphController } from "../graph/controller";
import { bucketOf, modulesOf } from "../graph/group";
import { Head } from "../parts/basics";
import { setQuery, url } from "../router";
import type { Spread } from "../store/durations";
import type { JobStore } from "../store/job";
import type { GraphRuntime } from "../store/ops";
import { HeldOrder } from "../store/order";
import type { GraphDocument } from "../types";

const MAX_ROWS = 500;

interface Row {
  readonly index: number;
  readonly name: string;
  readonly type: string;
  readonly bucket: string;
  readonly module: string;
  readonly replica: string;
  readonly count: number;
  readonly meanNs: number;
  readonly maxNs: number;
  readonly share: number;
}

function rowsOf(document: GraphDocument, graph: GraphRuntime, words: readonly string[]): Row[] {
  const modules = modulesOf(document);
  const total = graph.sumNs;
  return document.ops
    .map((op, index) => ({
      index,
      name: op.name,
      type: op.type,
      bucket: bucketOf(op),
      module: modules[index] ?? "",
      replica: op.replica < 0 ? "all" : String(op.replica),
      count: graph.count[index] ?? 0,
      meanNs: graph.meanNs(index),
      maxNs: graph.maxNs[index] ?? 0,
      share: total === 0 ? Number.NaN : (graph.totalNs[index] ?? 0) / total,
    }))
    .filter((row) =>
      words.every((word) => `${row.name} ${row.type} ${row.module} ${row.bucket}`.toLowerCase().includes(word)),
    );
}

const largest = (a: Row, b: Row): number => (b.share || 0) - (a.share || 0) || a.index - b.index;

export function OperatorTable({ store, graph }: { store: JobStore; graph: GraphController }) {
  const text = url.value.searchParams.get("ops") ?? "";
  const order = useRef<HeldOrder | null>(null);
  store.opsVersion.value;
  const runtime = store.shownRuntime.value;
  const document = store.shownDocument.value;
  if (runtime === undefined || document === null) return null;
  const found = rowsOf(document, runtime, text.toLowerCase().split(/\s+/).filter(Boolean));
  order.current ??= new HeldOrder();
  const rows = order.current.arrange(found, (row) => row.index, largest, performance.now());
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Operators" data-testid="operator-table">
      <div style={{ padding: "4px 14px 8px", maxWidth: "340px" }}>
        <input
          class="field"
          placeholder="Filter by name, type, module or role"
          aria-label="Filter operators"
          value={text}
          onInput={(event) => setQuery({ ops: event.currentTarget.value || null })}
        />
      </div>
      <table>
        <Head
          columns={[
            "Operator",
            ["Share ▾", "num"],
            ["Mean", "num"],
            ["p50", "num tiny-hide"],
            ["p99", "num tiny-hide"],
            ["Max", "num tiny-hide"],
            ["Ran", "num tiny-hide"],
            ["Critical", "tiny-hide"],
            ["Role", "tiny-hide"],
            ["Type", "tiny-hide"],
            ["Module", "tiny-hide"],
            ["Replica", "tiny-hide"],
            ["#", "num tiny-hide"],
          ]}
        />
        <tbody>
          {rows.slice(0, MAX_ROWS).map((row) => (
            <OperatorRow
              key={row.index}
              row={row}
              spread={runtime.durations.of([row.index])}
              critical={graph.critical.ops.has(row.index)}
            />
          ))}
        </tbody>
      </table>
      {rows.length > MAX_ROWS && (
        <p class="muted" style={{ padding: "8px 14px" }}>
          {integer(rows.length - MAX_ROWS)} more; filter to see them.
        </p>
      )}
    </div>
  );
}

interface RowProps {
  readonly row: Row;
  /** Of the sampled runs; null without any. */
  readonly spread: Spread | null;
  readonly critical: boolean;
}

function OperatorRow({ row, spread, critical }: RowProps) {
  return (
    <tr>
      <td>
        <button type="button" class="linkish" onClick={() => setQuery({ op: String(row.index), view: null })}>
          {row.name}
        </button>
      </td>
      <td class="num">{percent(row.share)}</td>
      <td class="num">{nanos(row.meanNs)}</td>
      <td class="num tiny-hide">{spread === null ? "–" : nanos(spread.p50)}</td>
      <td class="num tiny-hide">{spread === null ? "–" : nanos(spread.p99)}</td>
      <td class="num tiny-hide">{row.count === 0 ? "–" : nanos(row.maxNs)}</td>
      <td class="num tiny-hide">{integer(row.count)}</td>
      <td class="critical tiny-hide">{critical ? "yes" : ""}</td>
      <td class="tiny-hide">
        <i class={`swatch c-${row.bucket}`} />
        {row.bucket}
      </td>
      <td class="mono tiny-hide">{row.type}</td>
      <td class="tiny-hide">{row.module || "–"}</td>
      <td class="tiny-hide">{row.replica}</td>
      <td class="num tiny-hide">{row.index}</td>
    </tr>
  );
}

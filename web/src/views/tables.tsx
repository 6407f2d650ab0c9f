/** Sparse tables of parameter servers: how large, how busy, which ids are updated most, how even over servers. */
import { bytes, compact, integer, percent, plural } from "../format";
import { Head } from "../parts/basics";
import { useHeldOrder } from "../parts/held";
import { setQuery, url } from "../router";
import { isTerminal, type JobStore } from "../store/job";
import type { HotId, TableRow } from "../store/tables";

/** A part this much larger than the mean is worth a mark. */
const UNEVEN = 1.5;

export function tablesOf(store: JobStore): TableRow[] {
  store.syncVersion.value;
  const job = store.job.value;
  return job === null ? [] : store.tables.rows(job, isTerminal(job), performance.now());
}

export function Tables({ store }: { store: JobStore }) {
  const rows = tablesOf(store);
  if (rows.length === 0) return null;
  const wanted = url.value.searchParams.get("table");
  const chosen = rows.find((one) => one.name === wanted) ?? rows[0];
  return (
    <div>
      <h3 class="part-title">
        Sparse tables <em>{rows.length}</em>
      </h3>
      <table data-testid="sparse-tables">
        <Head
          columns={[
            "Table",
            ["Rows", "num"],
            ["Of capacity", "num narrow-hide"],
            ["Memory", "num"],
            ["Looked up", "num narrow-hide"],
            ["Found", "num narrow-hide"],
            ["Pushed", "num tiny-hide"],
            ["Largest part", "num"],
          ]}
        />
        <tbody>
          {rows.map((row) => (
            <TableLine key={row.name} row={row} chosen={rows.length > 1 && row === chosen} />
          ))}
        </tbody>
      </table>
      {chosen !== undefined && <Facts row={chosen} />}
    </div>
  );
}

const rate = (perS: number | null): string => (perS === null ? "–" : `${perS < 1 ? 0 : compact(perS)} ids/s`);
const skew = (of: number): string => `${of.toFixed(2)} × mean`;

function TableLine({ row, chosen }: { row: TableRow; chosen: boolean }) {
  const largest = Math.max(row.skewRows, row.skewPushes);
  return (
    <tr data-testid="sparse-table" data-table={row.name} class={chosen ? "chosen-row" : ""}>
      <td class="mono block-name">
        <button type="button" class="linkish" aria-pressed={chosen} onClick={() => setQuery({ table: row.name })}>
          {row.name}
        </button>{" "}
        <span class="muted">{row.width} wide</span>
      </td>
      <td class="num">{integer(row.rows)}</td>
      <td class="num narrow-hide">{row.capacity === 0 ? "–" : percent(row.rows / row.capacity)}</td>
      <td class="num">{bytes(row.bytes)}</td>
      <td class="num narrow-hide">{rate(row.pulledPerS)}</td>
      <td class="num narrow-hide" title="Looked-up ids that had a row already">
        {row.found === null ? "–" : percent(row.found)}
      </td>
      <td class="num tiny-hide">{rate(row.pushedPerS)}</td>
      <td class={`num ${largest >= UNEVEN ? "uneven" : ""}`} title="The server with the most rows, or pushes">
        {row.parts.length < 2 ? "one server" : skew(largest)}
      </td>
    </tr>
  );
}

const byShare = (a: HotId, b: HotId): number => b.share - a.share;

function Facts({ row }: { row: TableRow }) {
  const hot = useHeldOrder(row.name, row.hot, (one) => `${one.pserver}/${one.id}`, byShare);
  const most = Math.max(...row.hot.map((one) => one.share));
  const mostRows = Math.max(1, ...row.parts.map((part) => part.rows));
  const mostPushes = Math.max(1, ...row.parts.map((part) => part.pushed));
  return (
    <div class="table-facts" data-testid="table-facts">
      <table>
        <caption>Ids of {row.name} pushed most, share of all pushes (from a sample)</caption>
        <tbody>
          {hot.slice(0, 8).map(({ id, share, pserver }) => (
            <tr key={`${pserver}/${id}`} data-testid="hot-id" data-id={id}>
              <td class="mono">{id}</td>
              <td class="meter-cell">
                <i class="meter c-forward" style={{ width: `${(share / most) * 100}%` }} />
              </td>
              <td class="num">{percent(share)}</td>
              <td class="muted tiny-hide server-name">pserver-{pserver}</td>
            </tr>
          ))}
          {row.hot.length === 0 && (
            <tr>
              <td class="muted">No id stands out.</td>
            </tr>
          )}
        </tbody>
      </table>
      <table>
        <caption>
          Its {plural(row.parts.length, "part")}: rows {skew(row.skewRows)}, pushes {skew(row.skewPushes)}
        </caption>
        <tbody>
          {row.parts.map((part) => (
            <tr key={part.pserver}>
              <td class="mono server-name">pserver-{part.pserver}</td>
              <td class="num">{plural(part.rows, "row")}</td>
              <td class="meter-cell">
                <i class="meter c-forward" style={{ width: `${(part.rows / mostRows) * 100}%` }} />
              </td>
              <td class="num">{compact(part.pushed)} pushed</td>
              <td class="meter-cell tiny-hide">
                <i class="meter" style={{ width: `${(part.pushed / mostPushes) * 100}%` }} />
              </td>
              <td class="num tiny-hide">{bytes(part.bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Tables and histograms of a job, below its charts: the newest of each name, and those before it by a slider. */
import { useEffect, useState } from "preact/hooks";
import { integer, metric, plural } from "../format";
import { ErrorCard } from "../parts/basics";
import type { JobStore } from "../store/job";
import { isNumeric, type Order, sorted } from "../store/media";
import type { HistogramContent, MediaSeries, TableContent } from "../types";

/** Rows that are in the document; the rest is for sorting and export. */
const SHOWN_ROWS = 200;
const [WIDTH, HEIGHT] = [480, 150];

export function MediaCards({ store }: { store: JobStore }) {
  const failure = store.media.error.value;
  return (
    <>
      {failure !== null && <ErrorCard error={failure} subject="Tables and histograms" />}
      <div class="media-cards">
        {store.media.series.value.map((one) => (
          <MediaCard key={one.name} store={store} series={one} />
        ))}
      </div>
    </>
  );
}

function MediaCard({ store, series }: { store: JobStore; series: MediaSeries }) {
  // The id stays chosen while newer ones come; null follows the newest.
  const [chosen, choose] = useState<string | null>(null);
  const [order, setOrder] = useState<Order | null>(null); // here: no table is drawn while another step's loads
  const { items, name } = series;
  const found = items.findIndex((one) => one.id === chosen);
  const index = found < 0 ? items.length - 1 : found;
  const item = items[index];
  const id = item?.id ?? "";
  useEffect(() => {
    if (id !== "") void store.media.want(id);
  }, [store, id]);
  const content = store.media.contents.value.get(id);
  if (item === undefined) return null;
  const older = series.removed > 0 ? ` · ${plural(series.removed, "older one")} removed` : "";
  const attempt = item.attempt > 1 ? ` of attempt ${item.attempt}` : "";
  return (
    <section class="chart" aria-label={name} data-testid="media">
      <header>
        <span class="clip">{name}</span>
        <small class="muted" data-testid="media-step">
          step {integer(item.step)}
          {attempt} · {index + 1} of {items.length}
          {older}
        </small>
      </header>
      {items.length > 1 && (
        <input
          type="range"
          min={0}
          max={items.length - 1}
          value={index}
          aria-label={`Step of ${name}`}
          aria-valuetext={`step ${item.step}`}
          onInput={(event) => {
            const at = Number(event.currentTarget.value);
            choose(at === items.length - 1 ? null : (items[at]?.id ?? null));
          }}
        />
      )}
      {content === undefined ? (
        <div class="muted" aria-busy="true">
          Loading…
        </div>
      ) : content.type === "table" ? (
        <LoggedTable name={name} content={content} order={order} setOrder={setOrder} />
      ) : (
        <LoggedHistogram name={name} content={content} />
      )}
    </section>
  );
}

interface LoggedTableProps {
  name: string;
  content: TableContent;
  order: Order | null;
  setOrder: (order: Order | null) => void;
}

function LoggedTable({ name, content, order, setOrder }: LoggedTableProps) {
  const { columns, rows } = content;
  const used = order !== null && order.column < columns.length ? order : null;
  const shown = sorted(rows, used).slice(0, SHOWN_ROWS);
  const numeric = columns.map((_, column) => isNumeric(rows, column));
  const turn = (column: number) =>
    setOrder(
      used?.column !== column ? { column, descending: false } : used.descending ? null : { column, descending: true },
    );
  return (
    <>
      <div class="media-table" tabIndex={0} role="region" aria-label={`Table ${name}`}>
        <table>
          <thead>
            <tr>
              {columns.map((title, column) => (
                <th
                  key={column}
                  scope="col"
                  class={numeric[column] ? "num" : ""}
                  aria-sort={used?.column !== column ? "none" : used.descending ? "descending" : "ascending"}
                >
                  <button type="button" onClick={() => turn(column)}>
                    {title}
                    {used?.column === column && <span aria-hidden="true">{used.descending ? " ▾" : " ▴"}</span>}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row, number) => (
              <tr key={number}>
                {row.map((cell, column) => (
                  <td key={column} class={numeric[column] ? "num" : ""}>
                    {cell === null ? "–" : String(cell)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > SHOWN_ROWS && (
        <small class="muted">
          The first {SHOWN_ROWS} of {integer(rows.length)} rows in this order; all of them:{" "}
          <code>penstock export JOB --format media</code>
        </small>
      )}
    </>
  );
}

function LoggedHistogram({ name, content }: { name: string; content: HistogramContent }) {
  const { edges, counts } = content;
  const most = Math.max(1, ...counts);
  const [low, high] = [edges[0] ?? 0, edges[edges.length - 1] ?? 1];
  const x = (value: number) => ((value - low) / (high - low)) * WIDTH;
  const total = counts.reduce((sum, one) => sum + one, 0);
  const values = `${integer(total)} values from ${metric(low)} to ${metric(high)}`;
  return (
    <>
      <svg
        class="media-histogram"
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${name}: ${values}`}
      >
        {counts.map((count, bin) => {
          const [from, to] = [edges[bin] ?? low, edges[bin + 1] ?? high];
          const height = (count / most) * (HEIGHT - 4);
          return (
            <rect
              key={from}
              x={x(from)}
              y={HEIGHT - height}
              width={Math.max(0.5, x(to) - x(from) - 0.5)}
              height={height}
            >
              <title>{`${metric(from)} to ${metric(to)}: ${integer(count)}`}</title>
            </rect>
          );
        })}
      </svg>
      <div class="media-axis muted">
        <small>{metric(low)}</small>
        <small>
          {integer(total)} values, at most {integer(most)} in one of {counts.length} bins
          {content.left_out > 0 && `; ${integer(content.left_out)} not finite`}
        </small>
        <small>{metric(high)}</small>
      </div>
    </>
  );
}

/** Tables and histograms that a job logs: which there are, by name and step, and the content of those that are shown. */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import { throttled } from "../frameloop";
import type { MediaContent, MediaSeries, TableContent } from "../types";

const REFRESH_MS = 1000;
/** Contents that stay in memory: a megabyte each at most. */
const KEPT = 24;

export type Cell = TableContent["rows"][number][number];
export interface Order {
  readonly column: number;
  readonly descending: boolean;
}

export class MediaStore {
  readonly series = signal<readonly MediaSeries[]>([]);
  readonly contents = signal<ReadonlyMap<string, MediaContent>>(new Map());
  /** Of the last request that failed; null once one goes well. */
  readonly error = signal<ApiError | null>(null);
  #opened = false;
  #asked = new Set<string>();
  #later = throttled(REFRESH_MS, () => void this.refresh());

  constructor(
    private readonly list: () => Promise<{ readonly items: readonly MediaSeries[] }>,
    private readonly fetchOne: (id: string) => Promise<MediaContent>,
  ) {}

  /** Read the list, and follow it from now on. */
  open(): void {
    this.#opened = true;
    void this.refresh();
  }

  /** Something was logged. */
  changed(): void {
    if (this.#opened) this.#later();
  }

  async refresh(): Promise<void> {
    await this.#guarded(async () => {
      this.series.value = (await this.list()).items;
    });
  }

  /** Fetch one that is to be shown, unless it is there; it never changes. */
  async want(id: string): Promise<void> {
    if (this.contents.value.has(id) || this.#asked.has(id)) return;
    this.#asked.add(id);
    await this.#guarded(async () => {
      const found = await this.fetchOne(id);
      this.contents.value = new Map([...this.contents.value, [id, found] as const].slice(-KEPT));
    });
    this.#asked.delete(id);
  }

  async #guarded(act: () => Promise<void>): Promise<void> {
    try {
      await act();
      this.error.value = null;
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      this.error.value = failure;
    }
  }
}

/** Rows by one column: numbers by size before texts by letters, empty cells last in both directions. */
export function sorted(rows: TableContent["rows"], order: Order | null): TableContent["rows"] {
  if (order === null) return rows;
  const sign = order.descending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [a[order.column] ?? null, b[order.column] ?? null];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * compared(x, y);
  });
}

function compared(x: NonNullable<Cell>, y: NonNullable<Cell>): number {
  const [isText, otherIsText] = [typeof x === "string", typeof y === "string"];
  if (isText !== otherIsText) return Number(isText) - Number(otherIsText);
  if (typeof x === "string" && typeof y === "string") return x < y ? -1 : Number(x > y);
  return Number(x) - Number(y);
}

/** Whether a column holds numbers alone, and is aligned by them. */
export function isNumeric(rows: TableContent["rows"], column: number): boolean {
  return rows.length > 0 && rows.every((row) => row[column] === null || typeof row[column] === "number");
}

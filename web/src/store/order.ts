/** The order of a live table: sorted anew every few seconds, so that a row can be read before it moves. Pure. */

export const HOLD_MS = 5000;

export class HeldOrder {
  #at = Number.NEGATIVE_INFINITY;
  #place = new Map<string | number, number>();

  /** `items` in the order of the last sorting, new ones after them; by `compare` if that is long ago. */
  arrange<T>(
    items: readonly T[],
    idOf: (item: T) => string | number,
    compare: (a: T, b: T) => number,
    nowMs: number,
  ): T[] {
    if (nowMs - this.#at >= HOLD_MS || this.#place.size === 0) {
      this.#at = nowMs;
      const sorted = [...items].sort(compare);
      this.#place = new Map(sorted.map((item, index) => [idOf(item), index]));
      return sorted;
    }
    const place = (item: T) => this.#place.get(idOf(item)) ?? Number.POSITIVE_INFINITY;
    return [...items].sort((a, b) => place(a) - place(b) || 0);
  }
}

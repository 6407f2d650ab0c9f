/** A live table's rows, in an order that is held for some seconds. */
import { useRef } from "preact/hooks";
import { HeldOrder } from "../store/order";

/** `of`: what the rows are of, or are sorted by; another one is sorted at once. */
export function useHeldOrder<T>(
  of: string,
  items: readonly T[],
  idOf: (item: T) => string | number,
  compare: (a: T, b: T) => number,
): T[] {
  const held = useRef<{ readonly of: string; readonly order: HeldOrder } | null>(null);
  if (held.current?.of !== of) held.current = { of, order: new HeldOrder() };
  return held.current.order.arrange(items, idOf, compare, performance.now());
}

/** Tables and histograms that a job logged: how they are sorted, fetched once, and followed. */
import { expect, test, vi } from "vitest";
import { ApiError } from "../src/api";
import { isNumeric, MediaStore, sorted } from "../src/store/media";
import type { MediaContent, MediaSeries } from "../src/types";

const rows = [
  ["b", 2],
  ["a", null],
  [null, -1],
  [7, 10],
] as const;
const column = (order: Parameters<typeof sorted>[1], at: number) => sorted(rows, order).map((row) => row[at]);

test("rows are sorted by size, texts after numbers, and empty cells are last in both directions", () => {
  expect(column({ column: 1, descending: false }, 1)).toEqual([-1, 2, 10, null]);
  expect(column({ column: 1, descending: true }, 1)).toEqual([10, 2, -1, null]);
  expect(column({ column: 0, descending: false }, 0)).toEqual([7, "a", "b", null]);
  expect(column(null, 0)).toEqual(["b", "a", null, 7]);
});

test("a column of numbers and empty cells is numeric, one with a text is not", () => {
  expect([isNumeric(rows, 1), isNumeric(rows, 0), isNumeric([], 0)]).toEqual([true, false, false]);
});

const content = (name: string): MediaContent => ({ type: "table", columns: [name], rows: [] });

test("what is shown is fetched once, and again after an error", async () => {
  const fetchOne = vi
    .fn<(id: string) => Promise<MediaContent>>()
    .mockRejectedValueOnce(new ApiError(503, "the database cannot be used now"))
    .mockImplementation(async (id) => content(id));
  const store = new MediaStore(async () => ({ items: [] }), fetchOne);
  await store.want("a");
  expect([store.error.value?.status, store.contents.value.size]).toEqual([503, 0]);
  await Promise.all([store.want("a"), store.want("a")]);
  await store.want("a");
  expect([store.error.value, store.contents.value.get("a"), fetchOne.mock.calls.length]).toEqual([
    null,
    content("a"),
    2,
  ]);
});

test("contents in memory are bounded: the oldest go", async () => {
  const store = new MediaStore(
    async () => ({ items: [] }),
    async (id) => content(id),
  );
  for (let id = 0; id < 30; id++) await store.want(String(id));
  expect([store.contents.value.size, store.contents.value.has("5"), store.contents.value.has("6")]).toEqual([
    24,
    false,
    true,
  ]);
});

test("the list is read when the view opens, and followed from then on", async () => {
  const list = vi.fn(async () => ({ items: [{ name: "confusion" } as MediaSeries] }));
  const store = new MediaStore(list, async (id) => content(id));
  store.changed();
  expect(list).not.toHaveBeenCalled();
  store.open();
  await vi.waitFor(() => expect(store.series.value.map((one) => one.name)).toEqual(["confusion"]));
  store.changed();
  await vi.waitFor(() => expect(list).toHaveBeenCalledTimes(2));
});

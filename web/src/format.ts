/** Numbers, times and sizes as text. Pure; every number on the dashboard goes through here, so units agree. */

const THIN = "\u202f";
/** Between a number and its unit, which a line never parts. */
const FIRM = "\u00a0";
const UNITS = "%|[nµm]?s|min|h|d|[kMGT]?i?B";
const NUMBER_AND_UNIT = new RegExp(`(\\d) (?=(?:${UNITS})(?![\\p{L}\\p{N}]))`, "gu");

/** A sentence of the server's, in which no line parts a number from its unit. */
export const firm = (sentence: string): string => sentence.replace(NUMBER_AND_UNIT, `$1${FIRM}`);

export function integer(value: number): string {
  return Math.round(value)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, THIN);
}

/** 128 400 → "128.4k": four significant characters, for numbers that change while one reads. */
export function compact(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size >= 100) return integer(value);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function bytes(value: number): string {
  if (value < 1000) return `${Math.round(value)}${FIRM}B`;
  const units = ["kB", "MB", "GB", "TB"];
  let scaled = value;
  let unit = -1;
  while (scaled >= 999.5 && unit < units.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  return `${scaled >= 100 ? scaled.toFixed(0) : scaled.toPrecision(3)}${FIRM}${units[unit] ?? "B"}`;
}

/** Nanoseconds with the unit that keeps three digits. */
export function nanos(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value < 1000) return `${Math.round(value)}${FIRM}ns`;
  if (value < 1e6) return `${three(value / 1e3)}${FIRM}µs`;
  if (value < 1e9) return `${three(value / 1e6)}${FIRM}ms`;
  return `${three(value / 1e9)}${FIRM}s`;
}

function three(value: number): string {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Always milliseconds, so that a column of waits can be compared by eye. */
export function millis(valueNs: number): string {
  return `${(valueNs / 1e6).toFixed(valueNs >= 1e8 ? 0 : valueNs >= 1e7 ? 1 : valueNs >= 1e6 ? 2 : 3)}${FIRM}ms`;
}

/** 0.087 → "8.7 %". */
export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  return `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)}${THIN}%`;
}

export function seconds(value: number): string {
  if (!Number.isFinite(value) || value < 0) return "–";
  const whole = Math.round(value);
  if (whole < 60) return `${whole}${FIRM}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}${FIRM}min ${whole % 60}${FIRM}s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)}${FIRM}h ${Math.floor((whole % 3600) / 60)}${FIRM}min`;
  return `${Math.floor(whole / 86_400)}${FIRM}d ${Math.floor((whole % 86_400) / 3600)}${FIRM}h`;
}

/** A while since something began, with no more of it than says where: "0.5 s", "42 s", "3:05", "2:03:05", "3 d 4:00". */
export function elapsed(s: number): string {
  if (s < 60) return `${Number(s.toFixed(1))} s`;
  const whole = Math.round(s);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  const two = (value: number) => String(value).padStart(2, "0");
  if (days > 0) return `${days} d ${hours}:${two(minutes)}`;
  return hours > 0 ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function age(iso: string | null | undefined, nowMs: number): string {
  if (!iso) return "–";
  return seconds(Math.max(0, (nowMs - Date.parse(iso)) / 1000));
}

export function clock(iso: string | null | undefined): string {
  if (!iso) return "–";
  return new Date(iso).toLocaleTimeString(undefined, {
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hourCycle: "h23",
  });
}

/** The clock of a Unix time in milliseconds, with them. */
export function clockMs(unixMs: number): string {
  const at = new Date(unixMs);
  const two = (value: number) => String(value).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

export function metric(value: number | undefined | null): string {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return size >= 1000 ? compact(value) : value.toPrecision(4);
}

const TICKS = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

/** A number at an axis: 400K, 0.43, 1.5M. */
export const tick = (value: number): string => TICKS.format(value);

export function shape(dtype: string, sizes: readonly number[]): string {
  return `${SHORT_DTYPE[dtype.replace("torch.", "")] ?? dtype.replace("torch.", "")} [${sizes.join(", ")}]`;
}

const SHORT_DTYPE: Readonly<Record<string, string>> = {
  float32: "f32",
  float64: "f64",
  float16: "f16",
  bfloat16: "bf16",
  int64: "i64",
  int32: "i32",
  uint8: "u8",
  bool: "bool",
};

/** Few types make up all operators of a job, which ask for theirs by the thousand. */
const shortTypes = new Map<string, string>();

/** "aten.addmm.default" → "addmm": what fits a box. A product of matrices with its bias and activation is a matmul. */
export function shortType(type: string): string {
  let found = shortTypes.get(type);
  if (found === undefined) {
    found = shortened(type);
    shortTypes.set(type, found);
  }
  return found;
}

function shortened(type: string): string {
  if (type === "penstock.product.default") return "matmul";
  const parts = type.split(".");
  const name = (parts.length >= 2 ? parts[1] : parts[0]) ?? type;
  return name.replace(/^_+|_+$/g, "").replace(/_backward$/, " grad");
}

/**
 * Why a job failed, in two parts: the sentence, and the last line of the log that follows it, which is where a
 * traceback has its error. The second is empty where nothing follows.
 */
export function sentenceAndError(why: string): readonly [string, string] {
  const lines = why.split("\n").filter((line) => line.trim() !== "");
  return [lines[0] ?? "", lines.length > 1 ? (lines[lines.length - 1] ?? "").trim() : ""];
}

export function plural(count: number, noun: string, many = `${noun}s`): string {
  return `${integer(count)} ${count === 1 ? noun : many}`;
}

/** The next of 1, 2, 5 × 10^k at or above `value`. */
export function niceStep(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  const mantissa = value / power;
  return power * (mantissa <= 1 ? 1 : mantissa <= 2 ? 2 : mantissa <= 5 ? 5 : 10);
}

/** A time with as many digits as the step between two needs, so that no two are the same. */
export function axisLabel(at: number, step: number): string {
  if (at === 0) return "0";
  const [unit, size] = at < 1e3 ? ["ns", 1] : at < 1e6 ? ["µs", 1e3] : at < 1e9 ? ["ms", 1e6] : ["s", 1e9];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / (size as number)) - 1e-9)));
  return `${(at / (size as number)).toFixed(digits)} ${unit}`;
}

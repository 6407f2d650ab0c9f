/** What a page reads by REST when it opens, and again on request. */
import { useState } from "preact/hooks";
import { ApiError } from "../api";

export interface Loaded {
  /** Of the last attempt; null if that went well. */
  readonly error: ApiError | null;
  /** Run what may be refused; an error of the API is shown, any other is a fault of the page. */
  readonly guarded: (act: () => Promise<void>) => Promise<void>;
}

export function useLoaded(): Loaded {
  const [error, setError] = useState<ApiError | null>(null);
  const guarded = async (act: () => Promise<void>) => {
    try {
      await act();
      setError(null);
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
    }
  };
  return { error, guarded };
}

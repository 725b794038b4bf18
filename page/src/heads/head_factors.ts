/**
 * Factors of heads' outputs, as the address has them: "2.3,3.0x0.5" switches off head 3 of layer 2 and halves head 0 of
 * layer 3.
 */

/** "layer.head" and the factor of that head's output; 0: switched off; heads at 1 are left out. */
export type Factors = ReadonlyMap<string, number>;

export const LARGEST_FACTOR = 2;
export const FACTOR_STEP = 0.1;

const ENTRY = /^(0|[1-9]\d*)\.(0|[1-9]\d*)(?:x([01](?:\.\d)?|2(?:\.0)?))?$/;

/** What stands in an address; what these layers have no head for, or what is no factor, is left out. */
export function parsedFactors(text: string, layers: readonly { num_heads: number }[]): Map<string, number> {
  const factors = new Map<string, number>();
  for (const entry of text.split(",")) {
    const [, layer, head, factor = "0"] = ENTRY.exec(entry) ?? [];
    if (layer === undefined || !(Number(head) < (layers[Number(layer)]?.num_heads ?? 0))) continue;
    if (Number(factor) !== 1) factors.set(`${layer}.${head}`, Number(factor));
  }
  return factors;
}

/** The same as an address has it. */
export function factorsText(factors: Factors): string {
  return [...factors].map(([name, factor]) => (factor === 0 ? name : `${name}x${factor.toFixed(1)}`)).join();
}

/** Whether some head is neither on nor off. */
export function hasScaled(factors: Factors): boolean {
  return [...factors.values()].some((factor) => factor !== 0);
}

"""Contrast between a page's text and its background, as defined by WCAG."""

from playwright.async_api import Page

_LEAST = 4.5
"""Minimum contrast ratio of text for level AA."""
_MEASURE = """least => {
    const parsed = (text) => {
        const [red, green, blue, alpha = 1] = text.match(/[0-9.]+/g).map(Number);
        return { rgb: [red, green, blue], alpha };
    };
    const luminance = (rgb) => {
        const [red, green, blue] = rgb.map((value) => {
            const part = value / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const { rgb, alpha } = parsed(getComputedStyle(each).backgroundColor);
            if (alpha === 1) return rgb;
            if (alpha > 0) throw new Error(`a background that is partly seen through: ${each.className}`);
        }
        throw new Error('nothing is behind the page');
    };
    const contrast = (text, ground) => {
        const [light, dark] = [luminance(text), luminance(ground)].sort((a, b) => b - a);
        return (light + 0.05) / (dark + 0.05);
    };
    const found = [];
    const check = (element, colour, what) => {
        const ratio = contrast(parsed(colour).rgb, behind(element));
        if (ratio < least) found.push(`${what}: ${ratio.toFixed(2)}`);
    };
    let seen = 0;
    for (const element of document.querySelectorAll('body *')) {
        if (!element.checkVisibility({ visibilityProperty: true }) || element.disabled) continue;
        const own = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
        if (own.length) {
            seen += 1;
            check(element, getComputedStyle(element).color, own[0].data.trim().slice(0, 40));
        }
        if (element.placeholder) check(element, getComputedStyle(element, '::placeholder').color, element.name);
    }
    if (seen < 5) throw new Error('there is no text to measure');
    return found;
}"""


async def too_faint(page: Page) -> list[str]:
    """Return the visible texts, including placeholders, whose contrast is below the minimum for level AA. Each is given
    with its contrast."""
    found: list[str] = await page.evaluate(_MEASURE, _LEAST)
    return found
